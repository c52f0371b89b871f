package interop;

import com.alibaba.fastjson.JSONObject;
import java.lang.reflect.Method;
import org.apache.rocketmq.client.ClientConfig;

/** The settings that every client takes, and those whose types moved between the versions. */
final class Settings {
    private Settings() {
    }

    /** Apply the common settings; a client has an instance name of its own, hence a connection and a client id of its own. */
    static void apply(ClientConfig client, JSONObject said) {
        client.setNamesrvAddr(said.getString("name_server"));
        client.setInstanceName(said.containsKey("instance") ? said.getString("instance") : said.getString("name"));
        client.setPollNameServerInterval(1000);
        client.setPersistConsumerOffsetInterval(1000);
        client.setHeartbeatBrokerInterval(1000);
        client.setUseTLS(said.getBooleanValue("tls"));
        client.setVipChannelEnabled(said.getBooleanValue("vip"));
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
