package interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Messages, queues and send results from and to JSON; bodies are Base64. */
final class Messages {
    private Messages() {
    }

    static List<Message> parse(JSONArray several) {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < several.size(); i++) {
            messages.add(parse(several.getJSONObject(i)));
        }
        return messages;
    }

    static Message parse(JSONObject said) {
        byte[] body = Base64.getDecoder().decode(said.getString("body"));
        Message message = new Message(said.getString("topic"), said.getString("tags"), said.getString("keys"), body);
        JSONObject properties = said.getJSONObject("properties");
        if (properties != null) {
            properties.forEach((name, value) -> message.putUserProperty(name, String.valueOf(value)));
        }
        JSONObject system = said.getJSONObject("system");
        if (system != null) {
            system.forEach((name, value) -> MessageAccessor.putProperty(message, name, String.valueOf(value)));
        }
        if (said.containsKey("delay_level")) {
            message.setDelayTimeLevel(said.getIntValue("delay_level"));
        }
        for (String setter : List.of("setDelayTimeSec", "setDelayTimeMs", "setDeliverTimeMs")) {
            if (said.containsKey(setter)) {
                setTime(message, setter, said.getLongValue(setter));
            }
        }
        return message;
    }

    /** Client 4.9 does not have these methods. */
    private static void setTime(Message message, String setter, long value) {
        try {
            Message.class.getMethod(setter, long.class).invoke(message, value);
        } catch (ReflectiveOperationException missing) {
            throw new IllegalStateException(missing);
        }
    }

    private static String recallHandle(SendResult result) {
        try {
            return (String) SendResult.class.getMethod("getRecallHandle").invoke(result);
        } catch (ReflectiveOperationException missing) {
            return null;
        }
    }

    static List<Object> show(Iterable<MessageExt> messages) {
        List<Object> shown = new ArrayList<>();
        messages.forEach(message -> shown.add(show(message)));
        return shown;
    }

    static Map<String, Object> show(MessageExt message) {
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("topic", message.getTopic());
        shown.put("broker", message.getBrokerName());
        shown.put("queue", message.getQueueId());
        shown.put("offset", message.getQueueOffset());
        shown.put("body", Base64.getEncoder().encodeToString(message.getBody()));
        shown.put("tags", message.getTags());
        shown.put("keys", message.getKeys());
        shown.put("properties", new LinkedHashMap<>(message.getProperties()));
        shown.put("reconsume_times", message.getReconsumeTimes());
        shown.put("msg_id", message.getMsgId());
        boolean received = message instanceof MessageClientExt;
        shown.put("offset_msg_id", received ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId());
        shown.put("sys_flag", message.getSysFlag());
        shown.put("stored_size", message.getStoreSize());
        shown.put("born_ms", message.getBornTimestamp());
        shown.put("stored_ms", message.getStoreTimestamp());
        return shown;
    }

    static Map<String, Object> show(SendResult result) {
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("status", String.valueOf(result.getSendStatus()));
        shown.put("msg_id", result.getMsgId());
        shown.put("offset_msg_id", result.getOffsetMsgId());
        shown.put("broker", result.getMessageQueue().getBrokerName());
        shown.put("queue", result.getMessageQueue().getQueueId());
        shown.put("offset", result.getQueueOffset());
        shown.put("recall_handle", recallHandle(result));
        return shown;
    }

    static MessageQueue queue(JSONObject said) {
        return new MessageQueue(said.getString("topic"), said.getString("broker"), said.getIntValue("queue"));
    }

    static List<Object> showQueues(Iterable<MessageQueue> queues) {
        List<Object> shown = new ArrayList<>();
        queues.forEach(queue -> shown.add(Map.of("topic", queue.getTopic(), "broker", queue.getBrokerName(), "queue", queue.getQueueId())));
        return shown;
    }
}
