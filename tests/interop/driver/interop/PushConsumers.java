package interop;

import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.impl.consumer.RebalanceImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Push consumers: each message delivered is an event, and is acknowledged or not as the consumer was told. */
final class PushConsumers {
    private static final class Running {
        final String name;
        final DefaultMQPushConsumer consumer;
        volatile int failures;
        /** Sends a reply to each message, if there is one. */
        DefaultMQProducer replier;
        final Map<String, Integer> attempts = new ConcurrentHashMap<>();

        Running(String name, DefaultMQPushConsumer consumer, int failures) {
            this.name = name;
            this.consumer = consumer;
            this.failures = failures;
        }

        /** Tell of the messages and decide: the first *failures* deliveries of a message fail, all of them if negative. */
        boolean accept(List<MessageExt> messages) {
            boolean accepted = true;
            for (MessageExt message : messages) {
                if (replier != null) {
                    reply(replier, message);
                }
                int attempt = attempts.merge(message.getMsgId(), 1, Integer::sum);
                boolean fine = failures >= 0 && attempt > failures;
                accepted &= fine;
                Driver.emit(Map.of("event", "message", "consumer", name, "attempt", attempt, "accepted", fine, "message", Messages.show(message)));
            }
            return accepted;
        }
    }

    private static void reply(DefaultMQProducer replier, MessageExt message) {
        try {
            byte[] body = ("re: " + new String(message.getBody(), StandardCharsets.UTF_8)).getBytes(StandardCharsets.UTF_8);
            replier.send(MessageUtil.createReplyMessage(message, body), Settings.PATIENCE_MS);
        } catch (Exception failure) {
            throw new IllegalStateException("the reply was not delivered", failure);
        }
    }

    private final Map<String, Running> consumers = new ConcurrentHashMap<>();

    void register(Map<String, Driver.Command> commands) {
        commands.put("push.start", this::start);
        commands.put("push.queues", this::queues);
        commands.put("push.heal", this::heal);
        commands.put("push.commit", this::commit);
        commands.put("push.stop", this::stop);
    }

    private Object start(JSONObject said) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            said.getString("group"), Settings.hook(said), new AllocateMessageQueueAveragely(),
            said.getBooleanValue("trace"), null);
        Settings.apply(consumer, said);
        Settings.setModel(consumer, said.getBooleanValue("broadcasting") ? "BROADCASTING" : "CLUSTERING");
        consumer.setConsumeFromWhere(ConsumeFromWhere.valueOf("CONSUME_FROM_" + said.getString("from")));
        if (said.containsKey("from_time")) {
            consumer.setConsumeTimestamp(said.getString("from_time"));
        }
        consumer.setMaxReconsumeTimes(said.containsKey("retries_max") ? said.getIntValue("retries_max") : -1);
        if (said.containsKey("client_rebalance")) {
            Settings.setClientRebalance(consumer, said.getBooleanValue("client_rebalance"));
        }
        if (said.containsKey("invisible_ms")) {
            Settings.setPopInvisibleTime(consumer, said.getLongValue("invisible_ms"));
        }
        if (said.containsKey("pop_pause_s")) {
            Settings.setPopPauses(consumer.getDefaultMQPushConsumerImpl(), said.getIntValue("pop_pause_s"));
        }
        consumer.setSuspendCurrentQueueTimeMillis(100);
        // What was delivered last counts as consumed only after its listener has returned and the client has noted the
        // offset; without this wait a stop could overtake that, and the offset would never be told.
        consumer.setAwaitTerminationMillisWhenShutdown(60_000);
        for (Object topic : said.getJSONArray("topics")) {
            consumer.subscribe((String) topic, Settings.selector(said));
        }
        Running running = new Running(said.getString("name"), consumer, said.getIntValue("failures"));
        if (said.getBooleanValue("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                running.accept(messages) ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
                running.accept(messages) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER);
        }
        if (said.getBooleanValue("replying")) {
            running.replier = new DefaultMQProducer(said.getString("group") + "_replier", Settings.hook(said));
            Settings.apply(running.replier, said);
            running.replier.start();
            Settings.bePatient(running.replier);
        }
        consumers.put(running.name, running);
        consumer.start();
        Settings.bePatient(consumer);
        return true;
    }

    private Object queues(JSONObject said) throws ReflectiveOperationException {
        DefaultMQPushConsumer consumer = consumers.get(said.getString("name")).consumer;
        RebalanceImpl rebalance = consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl();
        Set<MessageQueue> queues = new HashSet<>(rebalance.getProcessQueueTable().keySet());
        queues.addAll(Settings.poppedQueues(rebalance));
        return Messages.showQueues(queues);
    }

    private Object heal(JSONObject said) {
        consumers.get(said.getString("name")).failures = 0;
        return true;
    }

    private Object commit(JSONObject said) {
        consumers.get(said.getString("name")).consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        return true;
    }

    private Object stop(JSONObject said) {
        Running running = consumers.remove(said.getString("name"));
        running.consumer.shutdown();
        if (running.replier != null) {
            running.replier.shutdown();
        }
        return true;
    }
}
