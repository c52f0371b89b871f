package interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLSocketFactory;
import javax.net.ssl.TrustManagerFactory;
import org.eclipse.paho.mqttv5.client.IMqttToken;
import org.eclipse.paho.mqttv5.client.MqttAsyncClient;
import org.eclipse.paho.mqttv5.client.MqttCallback;
import org.eclipse.paho.mqttv5.client.MqttConnectionOptions;
import org.eclipse.paho.mqttv5.client.MqttDisconnectResponse;
import org.eclipse.paho.mqttv5.client.persist.MemoryPersistence;
import org.eclipse.paho.mqttv5.common.MqttException;
import org.eclipse.paho.mqttv5.common.MqttMessage;
import org.eclipse.paho.mqttv5.common.packet.MqttProperties;
import org.eclipse.paho.mqttv5.common.packet.UserProperty;

/**
 * Eclipse Paho's client of MQTT 5, steered by lines of JSON: a command a line in, an answer or a message a line out. Ends
 * with its input. The commands are those of `Steered` in tests/interop/mqtt_clients.py.
 */
public final class MqttDriver {
    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
    private static final long PATIENCE_MS = 180_000;
    private static final Map<String, MqttAsyncClient> CLIENTS = new ConcurrentHashMap<>();

    private MqttDriver() {
    }

    public static void main(String[] none) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        ExecutorService threads = Executors.newCachedThreadPool();
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject command = JSON.parseObject(line);
            threads.execute(() -> answer(command));
        }
        Runtime.getRuntime().halt(0);
    }

    private static void answer(JSONObject command) {
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("id", command.getIntValue("id"));
        try {
            answer.put("result", run(command));
        } catch (Throwable failure) {
            answer.put("error", failure + " caused by " + failure.getCause());
        }
        emit(answer);
    }

    private static void emit(Map<String, ?> fields) {
        synchronized (OUT) {
            OUT.println(JSON.toJSONString(fields, com.alibaba.fastjson.serializer.SerializerFeature.WriteMapNullValue));
            OUT.flush();
        }
    }

    private static Map<String, Object> run(JSONObject command) throws Exception {
        MqttAsyncClient client = CLIENTS.get(command.getString("client"));
        switch (command.getString("do")) {
            case "connect":
                return Map.of("session_present", connect(command).getSessionPresent());
            case "subscribe":
                int[] codes = completed(client.subscribe(command.getString("filter"), command.getIntValue("qos"))).getReasonCodes();
                return Map.of("granted", codes[0]);
            case "publish":
                JSONObject message = command.getJSONObject("message");
                completed(client.publish(message.getString("topic"), toMessage(message)));
                return Map.of();
            case "disconnect":
                completed(client.disconnect());
                client.close();
                return Map.of();
            case "drop":
                client.disconnectForcibly(0, 0, false);
                client.close();
                return Map.of();
            default:
                throw new IllegalArgumentException("no command " + command.getString("do"));
        }
    }

    private static IMqttToken completed(IMqttToken token) throws MqttException {
        token.waitForCompletion(PATIENCE_MS);
        return token;
    }

    private static IMqttToken connect(JSONObject command) throws Exception {
        String name = command.getString("client");
        String url = command.getString("url").replaceFirst("^mqtts:", "ssl:").replaceFirst("^mqtt:", "tcp:");
        MqttConnectionOptions options = new MqttConnectionOptions();
        options.setCleanStart(command.getBooleanValue("clean"));
        options.setSessionExpiryInterval(command.getLong("expiry_s"));
        options.setAutomaticReconnect(false);
        options.setConnectionTimeout((int) (PATIENCE_MS / 1000));
        options.setKeepAliveInterval(600);
        if (command.getString("ca") != null) {
            options.setSocketFactory(trusting(command.getString("ca")));
        }
        JSONObject will = command.getJSONObject("will");
        if (will != null) {
            options.setWill(will.getString("topic"), toMessage(will));
            options.setWillMessageProperties(toProperties(will));
        }
        MqttAsyncClient client = new MqttAsyncClient(url, command.getString("client_id"), new MemoryPersistence());
        client.setCallback(new Emitter(name));
        CLIENTS.put(name, client);
        return completed(client.connect(options));
    }

    private static SSLSocketFactory trusting(String file) throws Exception {
        KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
        store.load(null, null);
        try (InputStream pem = new FileInputStream(file)) {
            store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(pem));
        }
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(store);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, trust.getTrustManagers(), null);
        return context.getSocketFactory();
    }

    private static MqttMessage toMessage(JSONObject message) {
        byte[] payload = Base64.getDecoder().decode(message.getString("payload"));
        MqttMessage found = new MqttMessage(payload, message.getIntValue("qos"), message.getBooleanValue("retain"), toProperties(message));
        return found;
    }

    private static MqttProperties toProperties(JSONObject message) {
        MqttProperties found = new MqttProperties();
        if (message.getBooleanValue("is_text")) {
            found.setPayloadFormat(true);
        }
        if (message.getLong("expiry_s") != null) {
            found.setMessageExpiryInterval(message.getLong("expiry_s"));
        }
        found.setContentType(message.getString("content_type"));
        found.setResponseTopic(message.getString("response_topic"));
        if (message.getString("correlation") != null) {
            found.setCorrelationData(Base64.getDecoder().decode(message.getString("correlation")));
        }
        List<UserProperty> user = new ArrayList<>();
        for (Object pair : message.getJSONArray("user")) {
            user.add(new UserProperty(((JSONArray) pair).getString(0), ((JSONArray) pair).getString(1)));
        }
        found.setUserProperties(user);
        return found;
    }

    private static Map<String, Object> fromMessage(String topic, MqttMessage message) {
        MqttProperties found = message.getProperties();
        Map<String, Object> said = new LinkedHashMap<>();
        said.put("topic", topic);
        said.put("payload", Base64.getEncoder().encodeToString(message.getPayload()));
        said.put("qos", message.getQos());
        said.put("retain", message.isRetained());
        List<List<String>> user = new ArrayList<>();
        for (UserProperty each : found.getUserProperties()) {
            user.add(List.of(each.getKey(), each.getValue()));
        }
        said.put("user", user);
        said.put("content_type", found.getContentType());
        said.put("response_topic", found.getResponseTopic());
        byte[] correlation = found.getCorrelationData();
        said.put("correlation", correlation == null ? null : Base64.getEncoder().encodeToString(correlation));
        said.put("expiry_s", found.getMessageExpiryInterval());
        said.put("is_text", found.getPayloadFormat());
        return said;
    }

    /** Prints what came to one client. */
    private static final class Emitter implements MqttCallback {
        private final String name;

        Emitter(String name) {
            this.name = name;
        }

        @Override
        public void messageArrived(String topic, MqttMessage message) {
            emit(Map.of("event", "message", "client", name, "message", fromMessage(topic, message)));
        }

        @Override
        public void disconnected(MqttDisconnectResponse response) {
        }

        @Override
        public void mqttErrorOccurred(MqttException failure) {
            failure.printStackTrace();
        }

        @Override
        public void deliveryComplete(IMqttToken token) {
        }

        @Override
        public void connectComplete(boolean isAgain, String url) {
        }

        @Override
        public void authPacketArrived(int reason, MqttProperties properties) {
        }
    }
}
