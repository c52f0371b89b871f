import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

/**
 * A stock push consumer works off a backlog; prints the messages a second between its first and its last message.
 * With a group as the fourth word it pops, if the broker's request mode for the group says so.
 */
public class Drain {
    public static void main(String[] words) throws Exception {
        String nameServer = words[0];
        String topic = words[1];
        long wanted = Long.parseLong(words[2]);
        AtomicLong seen = new AtomicLong();
        AtomicLong began = new AtomicLong();
        AtomicLong ended = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(words.length > 3 ? words[3] : "drain-" + System.nanoTime());
        consumer.setClientRebalance(words.length <= 3);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(32);
        consumer.setConsumeMessageBatchMaxSize(32);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            began.compareAndSet(0, System.nanoTime());
            long now = seen.addAndGet(messages.size());
            if (now >= wanted) {
                ended.compareAndSet(0, System.nanoTime());
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        done.await();
        System.out.printf("drained %.1f messages/s%n", wanted * 1e9 / (ended.get() - began.get()));
        consumer.shutdown();
        System.exit(0);
    }
}
