package interop;

import com.alibaba.fastjson.JSONObject;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Questions to a broker that the client library asks for tools: by id, by key, by time. */
final class Queries {
    private final Map<String, DefaultMQAdminExt> admins = new ConcurrentHashMap<>();

    void register(Map<String, Driver.Command> commands) {
        commands.put("query.start", this::start);
        commands.put("query.create_topic", this::createTopic);
        commands.put("query.view", said -> Messages.show(of(said).viewMessage(said.getString("topic"), said.getString("msg_id"))));
        commands.put("query.by_key", this::byKey);
        commands.put("query.offsets", this::offsets);
        commands.put("query.offset_at", said -> of(said).searchOffset(Messages.queue(said), said.getLongValue("time_ms")));
        commands.put("query.reset", this::reset);
        commands.put("query.stop", this::stop);
    }

    private DefaultMQAdminExt of(JSONObject said) {
        return admins.get(said.getString("name"));
    }

    private Object start(JSONObject said) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(Settings.hook(said), (long) Settings.PATIENCE_MS);
        Settings.apply(admin, said);
        admin.start();
        Settings.bePatient(admin);
        admins.put(said.getString("name"), admin);
        return true;
    }

    private Object createTopic(JSONObject said) throws Exception {
        Class<?> config = Class.forName("org.apache.rocketmq.common.TopicConfig");
        Object topic = config.getConstructor(String.class).newInstance(said.getString("topic"));
        config.getMethod("setReadQueueNums", int.class).invoke(topic, said.getIntValue("queues"));
        config.getMethod("setWriteQueueNums", int.class).invoke(topic, said.getIntValue("queues"));
        if (said.containsKey("perm")) {
            config.getMethod("setPerm", int.class).invoke(topic, said.getIntValue("perm"));
        }
        DefaultMQAdminExt.class.getMethod("createAndUpdateTopicConfig", String.class, config)
            .invoke(of(said), said.getString("broker_address"), topic);
        return true;
    }

    private Object byKey(JSONObject said) throws Exception {
        return Messages.show(of(said).queryMessage(
            said.getString("topic"), said.getString("key"), said.getIntValue("count_max"), 0, Long.MAX_VALUE).getMessageList());
    }

    private Object offsets(JSONObject said) throws Exception {
        MessageQueue queue = Messages.queue(said);
        Map<String, Object> offsets = new LinkedHashMap<>();
        offsets.put("min", of(said).minOffset(queue));
        offsets.put("max", of(said).maxOffset(queue));
        offsets.put("earliest_ms", of(said).earliestMsgStoreTime(queue));
        return offsets;
    }

    private Object reset(JSONObject said) throws Exception {
        Map<MessageQueue, Long> offsets = of(said).resetOffsetByTimestamp(
            said.getString("topic"), said.getString("group"), said.getLongValue("time_ms"), true);
        Map<String, Object> shown = new LinkedHashMap<>();
        offsets.forEach((queue, offset) -> shown.put(String.valueOf(queue.getQueueId()), offset));
        return shown;
    }

    private Object stop(JSONObject said) {
        admins.remove(said.getString("name")).shutdown();
        return true;
    }
}
