package interop;

import io.vertx.core.Future;
import io.vertx.core.Vertx;
import io.vertx.core.VertxOptions;
import io.vertx.core.buffer.Buffer;
import io.vertx.core.json.JsonArray;
import io.vertx.core.json.JsonObject;
import io.vertx.core.net.PemTrustOptions;
import io.vertx.ext.stomp.Command;
import io.vertx.ext.stomp.Frame;
import io.vertx.ext.stomp.StompClient;
import io.vertx.ext.stomp.StompClientConnection;
import io.vertx.ext.stomp.StompClientOptions;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * Vert.x's STOMP client, steered by lines of JSON: a command a line in, an answer or an event a line out. Ends with its
 * input. The commands are those of `SteeredClient` in tests/interop/stomp_clients.py.
 */
public final class StompDriver {
    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
    private static final Map<String, StompDriver> CLIENTS = new HashMap<>();

    private final String name;
    private final List<Frame> messages = new ArrayList<>();
    private StompClient client; // Vert.x closes one that nobody refers to
    private StompClientConnection connection;

    private StompDriver(String name) {
        this.name = name;
    }

    public static void main(String[] none) throws Exception {
        System.setOut(System.err);
        Vertx vertx = Vertx.vertx(new VertxOptions().setEventLoopPoolSize(1).setWorkerPoolSize(1).setInternalBlockingPoolSize(1));
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonObject command = new JsonObject(line);
            vertx.runOnContext(ignored -> answer(vertx, command));
        }
        Runtime.getRuntime().halt(0);
    }

    private static void answer(Vertx vertx, JsonObject command) {
        JsonObject answer = new JsonObject().put("id", command.getValue("id"));
        Future<?> done;
        try {
            StompDriver client = CLIENTS.computeIfAbsent(command.getString("client"), StompDriver::new);
            done = command.getString("do").equals("connect") ? client.connect(vertx, command) : client.run(command);
        } catch (RuntimeException failure) {
            done = Future.failedFuture(failure);
        }
        done.onSuccess(ignored -> emit(answer.put("result", new JsonObject())));
        done.onFailure(failure -> emit(answer.put("error", failure.toString())));
    }

    private static void emit(JsonObject fields) {
        OUT.println(fields.encode());
        OUT.flush();
    }

    private void tell(String event, JsonObject more) {
        emit(more.put("event", event).put("client", name));
    }

    private Future<?> connect(Vertx vertx, JsonObject command) {
        JsonArray beats = command.getJsonArray("heart_beat");
        StompClientOptions options = new StompClientOptions()
            .setHost(command.getString("host"))
            .setPort(command.getInteger("port"))
            .setHeartbeat(new JsonObject().put("x", beats.getInteger(0)).put("y", beats.getInteger(1)));
        if (!command.getString("ca").isEmpty()) {
            options.setSsl(true);
            options.setTrustOptions(new PemTrustOptions().addCertPath(command.getString("ca")));
            options.setHostnameVerificationAlgorithm("HTTPS");
        }
        client = StompClient.create(vertx, options);
        client.writingFrameHandler(frame -> {
            if (frame.getCommand() == Command.CONNECT) {
                command.getJsonObject("headers").forEach(header -> frame.addHeader(header.getKey(), (String) header.getValue()));
            }
        });
        client.receivedFrameHandler(frame -> {
            if (frame.getCommand() == Command.PING) {
                tell("beat", new JsonObject());
            }
        });
        client.errorFrameHandler(frame -> tell("error", new JsonObject()
            .put("text", frame.getHeader("message") + " " + frame.getBodyAsString())
            .put("receipt", frame.getHeader("receipt-id"))));
        return client.connect().onSuccess(connected -> {
            connection = connected;
            // A machine that stands still for a while must not cost the connection.
            connection.connectionDroppedHandler(ignored -> { });
            tell("connected", new JsonObject());
        });
    }

    private Future<?> run(JsonObject command) {
        String transaction = command.getString("transaction", "");
        switch (command.getString("do")) {
            case "subscribe":
                Map<String, String> asked = headers(command);
                asked.put("id", command.getString("number"));
                asked.put("ack", command.getString("ack"));
                return connection.subscribe(command.getString("destination"), asked, this::arrived);
            case "unsubscribe":
                Map<String, String> ended = headers(command);
                ended.put("id", command.getString("number"));
                return connection.unsubscribe(command.getString("destination"), ended);
            case "send":
                Map<String, String> given = headers(command);
                if (!transaction.isEmpty()) {
                    given.put("transaction", transaction);
                }
                Future<?> sent = connection.send(
                    command.getString("destination"), given, Buffer.buffer(Base64.getDecoder().decode(command.getString("body"))));
                return transaction.isEmpty() ? sent : Future.succeededFuture();
            case "settle":
                return settle(command, messages.get(command.getInteger("number")).getAck(), transaction);
            case "begin":
                return connection.beginTX(transaction);
            case "end":
                return command.getString("how").equals("commit") ? connection.commit(transaction) : connection.abort(transaction);
            case "disconnect":
                return connection.disconnect();
            case "drop":
            case "forget":
                if (connection != null && connection.isConnected()) {
                    connection.close();
                }
                return Future.succeededFuture();
            default:
                throw new IllegalArgumentException("no command " + command.getString("do"));
        }
    }

    private static Map<String, String> headers(JsonObject command) {
        Map<String, String> found = new HashMap<>();
        command.getJsonObject("headers").forEach(header -> found.put(header.getKey(), (String) header.getValue()));
        return found;
    }

    private Future<?> settle(JsonObject command, String ack, String transaction) {
        boolean refused = command.getString("how").equals("nack");
        if (transaction.isEmpty()) {
            return refused ? connection.nack(ack) : connection.ack(ack);
        }
        Future<?> ignored = refused ? connection.nack(ack, transaction) : connection.ack(ack, transaction);
        return Future.succeededFuture();
    }

    private void arrived(Frame frame) {
        messages.add(frame);
        JsonObject headers = new JsonObject();
        frame.getHeaders().forEach(headers::put);
        tell("message", new JsonObject()
            .put("number", messages.size() - 1)
            .put("headers", headers)
            .put("body", Base64.getEncoder().encodeToString(frame.getBodyAsByteArray())));
    }
}
