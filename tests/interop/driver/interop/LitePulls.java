package interop;

import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageQueue;

/** Lite pull consumers: subscribed (the group shares the queues) or assigned (the caller takes them all). */
final class LitePulls {
    private final Map<String, DefaultLitePullConsumer> consumers = new ConcurrentHashMap<>();

    void register(Map<String, Driver.Command> commands) {
        commands.put("lite.start", this::start);
        commands.put("lite.poll", said -> Messages.show(of(said).poll(said.getLongValue("wait_ms"))));
        commands.put("lite.queues", said -> Messages.showQueues(of(said).fetchMessageQueues(said.getString("topic"))));
        commands.put("lite.assignment", said -> Messages.showQueues(of(said).assignment()));
        commands.put("lite.seek", this::seek);
        commands.put("lite.offset_at", said -> of(said).offsetForTimestamp(Messages.queue(said), said.getLong("time_ms")));
        commands.put("lite.commit", this::commit);
        commands.put("lite.committed", said -> of(said).committed(Messages.queue(said)));
        commands.put("lite.stop", this::stop);
    }

    private DefaultLitePullConsumer of(JSONObject said) {
        return consumers.get(said.getString("name"));
    }

    private Object start(JSONObject said) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(said.getString("group"), Settings.hook(said));
        Settings.apply(consumer, said);
        consumer.setAutoCommit(said.getBooleanValue("auto_commit"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        boolean assigned = said.getBooleanValue("assign");
        if (!assigned) {
            consumer.subscribe(said.getString("topic"), Settings.selector(said));
        }
        consumer.start();
        Settings.bePatient(consumer);
        if (assigned) {
            consumer.assign(consumer.fetchMessageQueues(said.getString("topic")));
        }
        consumers.put(said.getString("name"), consumer);
        return true;
    }

    private Object seek(JSONObject said) throws Exception {
        MessageQueue queue = Messages.queue(said);
        switch (said.getString("where")) {
            case "begin":
                of(said).seekToBegin(queue);
                break;
            case "end":
                of(said).seekToEnd(queue);
                break;
            default:
                of(said).seek(queue, said.getLongValue("where"));
        }
        return true;
    }

    private Object commit(JSONObject said) {
        of(said).commitSync();
        return true;
    }

    private Object stop(JSONObject said) {
        consumers.remove(said.getString("name")).shutdown();
        return true;
    }
}
