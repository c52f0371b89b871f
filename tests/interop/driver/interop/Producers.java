package interop;

import com.alibaba.fastjson.JSONObject;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** Producers: every way to send. A send that fails is an answer too. */
final class Producers {
    private interface Send {
        Object run() throws Exception;
    }

    /** Takes the queue that the caller's number names, whatever the message is. */
    private static final MessageQueueSelector BY_NUMBER =
        (queues, message, number) -> queues.get(((Integer) number) % queues.size());

    /** RocketMQ's code for a send that found no route, so that nothing was sent. */
    private static final int NO_ROUTE = 10005;
    private static final int ROUTE_TRIES = 5;

    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();

    void register(Map<String, Driver.Command> commands) {
        commands.put("producer.start", this::start);
        commands.put("producer.send", this::send);
        commands.put("producer.request", this::request);
        commands.put("producer.flood", this::flood);
        commands.put("producer.recall", this::recall);
        commands.put("producer.queues", this::queues);
        commands.put("producer.stop", this::stop);
    }

    private Object start(JSONObject said) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(
            said.getString("group"), Settings.hook(said), said.getBooleanValue("trace"), null);
        Settings.apply(producer, said);
        producer.setSendMsgTimeout(said.containsKey("timeout_ms") ? said.getIntValue("timeout_ms") : Settings.PATIENCE_MS);
        if (said.containsKey("queues")) {
            producer.setDefaultTopicQueueNums(said.getIntValue("queues"));
        }
        if (said.containsKey("compress_over")) {
            producer.setCompressMsgBodyOverHowmuch(said.getIntValue("compress_over"));
        }
        if (said.containsKey("size_max")) {
            producer.setMaxMessageSize(said.getIntValue("size_max"));
        }
        if (said.containsKey("retries")) {
            producer.setRetryTimesWhenSendFailed(said.getIntValue("retries"));
            producer.setRetryTimesWhenSendAsyncFailed(said.getIntValue("retries"));
        }
        producer.start();
        Settings.bePatient(producer);
        producers.put(said.getString("name"), producer);
        return true;
    }

    private Object queues(JSONObject said) throws Exception {
        return Messages.showQueues(producers.get(said.getString("name")).fetchPublishMessageQueues(said.getString("topic")));
    }

    private Object stop(JSONObject said) {
        producers.remove(said.getString("name")).shutdown();
        return true;
    }

    private Object request(JSONObject said) throws Exception {
        DefaultMQProducer producer = producers.get(said.getString("name"));
        Message message = Messages.parse(said.getJSONArray("messages")).get(0);
        Message reply = producer.request(message, said.getLongValue("timeout_ms"));
        return Map.of("body", Base64.getEncoder().encodeToString(reply.getBody()), "properties", reply.getProperties());
    }

    private Object send(JSONObject said) {
        DefaultMQProducer producer = producers.get(said.getString("name"));
        List<Message> messages = Messages.parse(said.getJSONArray("messages"));
        List<Object> results = new ArrayList<>();
        if (said.getString("how").equals("batch")) {
            results.add(routed(() -> Messages.show(said.containsKey("to") ? producer.send(messages, Messages.queue(said.getJSONObject("to"))) : producer.send(messages))));
        } else if (said.getString("how").equals("async")) {
            List<CompletableFuture<Object>> pending = new ArrayList<>();
            messages.forEach(message -> pending.add(sendAsync(producer, message, said)));
            for (int i = 0; i < messages.size(); i++) {
                Message message = messages.get(i);
                results.add(routed(pending.get(i).join(), () -> sendAsync(producer, message, said).join()));
            }
        } else {
            messages.forEach(message -> results.add(routed(() -> sendOne(producer, message, said))));
        }
        return results;
    }

    /** Client 4.9 cannot recall. */
    private Object recall(JSONObject said) throws Exception {
        DefaultMQProducer producer = producers.get(said.getString("name"));
        try {
            return DefaultMQProducer.class.getMethod("recallMessage", String.class, String.class)
                .invoke(producer, said.getString("topic"), said.getString("handle"));
        } catch (InvocationTargetException failed) {
            throw (Exception) failed.getCause();
        }
    }

    /** Send message after message until one fails, which happens when the broker dies. */
    private Object flood(JSONObject said) {
        DefaultMQProducer producer = producers.get(said.getString("name"));
        List<Object> results = new ArrayList<>();
        Object result;
        do {
            byte[] body = (said.getString("prefix") + " " + results.size()).getBytes(StandardCharsets.UTF_8);
            result = routed(() -> Messages.show(producer.send(new Message(said.getString("topic"), body))));
            results.add(result);
        } while (!((Map<?, ?>) result).containsKey("error"));
        return results;
    }

    private static Object routed(Send send) {
        return routed(attempt(send), send);
    }

    /** Begin a send that found no route again: a client waits 3 s for its table of routes, less than a machine may stand still. */
    private static Object routed(Object first, Send again) {
        Object result = first;
        for (int tries = 1; tries < ROUTE_TRIES && isRouteless((Map<?, ?>) result); tries++) {
            result = attempt(again);
        }
        return result;
    }

    private static boolean isRouteless(Map<?, ?> result) {
        Map<?, ?> error = (Map<?, ?>) result.get("error");
        return error != null && error.get("code").equals(NO_ROUTE);
    }

    private static Object attempt(Send send) {
        try {
            return send.run();
        } catch (Throwable failure) {
            return Map.of("error", Driver.Failures.describe(failure));
        }
    }

    private static Object sendOne(DefaultMQProducer producer, Message message, JSONObject said) throws Exception {
        boolean chosen = said.containsKey("to");
        boolean selected = said.containsKey("select");
        if (said.getString("how").equals("oneway")) {
            if (chosen) {
                producer.sendOneway(message, Messages.queue(said.getJSONObject("to")));
            } else if (selected) {
                producer.sendOneway(message, BY_NUMBER, said.getInteger("select"));
            } else {
                producer.sendOneway(message);
            }
            return Map.of();
        }
        if (chosen) {
            return Messages.show(producer.send(message, Messages.queue(said.getJSONObject("to"))));
        }
        return Messages.show(selected ? producer.send(message, BY_NUMBER, said.getInteger("select")) : producer.send(message));
    }

    private static CompletableFuture<Object> sendAsync(DefaultMQProducer producer, Message message, JSONObject said) {
        CompletableFuture<Object> answer = new CompletableFuture<>();
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                answer.complete(Messages.show(result));
            }

            @Override
            public void onException(Throwable failure) {
                answer.complete(Map.of("error", Driver.Failures.describe(failure)));
            }
        };
        try {
            if (said.containsKey("select")) {
                producer.send(message, BY_NUMBER, said.getInteger("select"), callback);
            } else {
                producer.send(message, callback);
            }
        } catch (Throwable failure) {
            answer.complete(Map.of("error", Driver.Failures.describe(failure)));
        }
        return answer;
    }
}
