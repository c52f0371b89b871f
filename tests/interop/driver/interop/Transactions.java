package interop;

import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Transactional producers: a message says in its properties what its listener answers, and each check is an event. */
final class Transactions {
    private final Map<String, TransactionMQProducer> producers = new ConcurrentHashMap<>();

    void register(Map<String, Driver.Command> commands) {
        commands.put("transactions.start", this::start);
        commands.put("transactions.send", this::send);
        commands.put("transactions.stop", this::stop);
    }

    private Object start(JSONObject said) throws Exception {
        String name = said.getString("name");
        TransactionMQProducer producer = new TransactionMQProducer(said.getString("group"), Settings.hook(said));
        Settings.apply(producer, said);
        producer.setSendMsgTimeout(Settings.PATIENCE_MS);
        producer.setTransactionListener(new Listener(name));
        producer.start();
        Settings.bePatient(producer);
        producers.put(name, producer);
        return true;
    }

    private Object send(JSONObject said) {
        TransactionMQProducer producer = producers.get(said.getString("name"));
        List<Object> results = new ArrayList<>();
        for (Message message : Messages.parse(said.getJSONArray("messages"))) {
            try {
                results.add(Messages.show(producer.sendMessageInTransaction(message, null)));
            } catch (Throwable failure) {
                results.add(Map.of("error", Driver.Failures.describe(failure)));
            }
        }
        return results;
    }

    private Object stop(JSONObject said) {
        producers.remove(said.getString("name")).shutdown();
        return true;
    }

    private static final class Listener implements TransactionListener {
        private final String name;
        private final Map<String, AtomicInteger> checks = new ConcurrentHashMap<>();

        Listener(String name) {
            this.name = name;
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return state(message.getUserProperty("local"));
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            int attempt = checks.computeIfAbsent(message.getTransactionId(), id -> new AtomicInteger()).incrementAndGet();
            Driver.emit(Map.of("event", "message", "consumer", name, "attempt", attempt, "accepted", true, "message", Messages.show(message)));
            return state(message.getUserProperty("check"));
        }

        private static LocalTransactionState state(String said) {
            switch (said == null ? "" : said) {
                case "commit":
                    return LocalTransactionState.COMMIT_MESSAGE;
                case "rollback":
                    return LocalTransactionState.ROLLBACK_MESSAGE;
                case "throw":
                    throw new IllegalStateException("as the test wants it");
                default:
                    return LocalTransactionState.UNKNOW;
            }
        }
    }
}
