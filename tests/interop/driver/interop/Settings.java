package interop;

import com.alibaba.fastjson.JSONObject;
import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/** The settings that every client takes, and those whose types moved between the versions. */
final class Settings {
    /** How long a client waits for an answer: its own 3 to 6 s are over when a busy machine stands still for a moment. */
    static final int PATIENCE_MS = 120_000;

    private Settings() {
    }

    /** Apply the common settings; a client has an instance name of its own, hence a connection and a client id of its own. */
    static void apply(ClientConfig client, JSONObject said) {
        client.setNamesrvAddr(said.getString("name_server"));
        client.setInstanceName(said.containsKey("instance") ? said.getString("instance") : said.getString("name"));
        client.setPollNameServerInterval(1000);
        client.setPersistConsumerOffsetInterval(1000);
        client.setHeartbeatBrokerInterval(1000);
        client.setMqClientApiTimeout(PATIENCE_MS);
        client.setUseTLS(said.getBooleanValue("tls"));
        client.setVipChannelEnabled(said.getBooleanValue("vip"));
    }

    /** The messages that a consumer wants: tags, or an SQL92 expression after "SQL92:". */
    static MessageSelector selector(JSONObject said) {
        String expression = said.getString("expression");
        return expression.startsWith("SQL92:")
            ? MessageSelector.bySql(expression.substring("SQL92:".length())) : MessageSelector.byTag(expression);
    }

    /** What signs the requests of a client that has an access key; null for the others. */
    static RPCHook hook(JSONObject said) {
        if (!said.containsKey("access_key")) {
            return null;
        }
        return new AclClientRPCHook(new SessionCredentials(said.getString("access_key"), said.getString("secret_key")));
    }

    /** Let a client that was started wait as long for what has a limit of its own: queues of a topic, and their offsets. */
    static void bePatient(ClientConfig started) {
        MQClientManager.getInstance().getOrCreateMQClientInstance(started).getMQAdminImpl().setTimeoutMillis(PATIENCE_MS);
    }

    /** Let the broker share out the queues, or the client; 4.x has no such setting. */
    static void setClientRebalance(Object consumer, boolean own) throws ReflectiveOperationException {
        consumer.getClass().getMethod("setClientRebalance", boolean.class).invoke(consumer, own);
    }

    /** Set how long a popped message is invisible to others; 4.x has no such setting. */
    static void setPopInvisibleTime(Object consumer, long ms) throws ReflectiveOperationException {
        consumer.getClass().getMethod("setPopInvisibleTime", long.class).invoke(consumer, ms);
    }

    /** Set how long a consumer that pops lets a failed message wait, after each failure; it has no setting for that. */
    static void setPopPauses(Object consumerImpl, int seconds) throws ReflectiveOperationException {
        Method pauses = consumerImpl.getClass().getDeclaredMethod("getPopDelayLevel");
        pauses.setAccessible(true);
        Arrays.fill((int[]) pauses.invoke(consumerImpl), seconds);
    }

    /** The queues that a consumer pops, -1 for all of a broker; 4.x knows no such table. */
    static Set<MessageQueue> poppedQueues(Object rebalance) throws ReflectiveOperationException {
        for (Method method : rebalance.getClass().getMethods()) {
            if (method.getName().equals("getPopProcessQueueTable")) {
                @SuppressWarnings("unchecked")
                Map<MessageQueue, ?> table = (Map<MessageQueue, ?>) method.invoke(rebalance);
                return table.keySet();
            }
        }
        return Set.of();
    }

    /** Call setMessageModel: the enum lives in another package in 4.x than in 5.x. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    static void setModel(Object consumer, String model) throws ReflectiveOperationException {
        for (Method method : consumer.getClass().getMethods()) {
            if (method.getName().equals("setMessageModel")) {
                method.invoke(consumer, Enum.valueOf((Class) method.getParameterTypes()[0], model));
                return;
            }
        }
        throw new NoSuchMethodException("setMessageModel");
    }
}
