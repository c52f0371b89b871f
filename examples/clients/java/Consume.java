import java.nio.charset.StandardCharsets;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** Prints the bodies of COUNT messages: Consume NAME_SERVER TOPIC COUNT. */
public class Consume {
    public static void main(String[] words) throws Exception {
        CountDownLatch left = new CountDownLatch(Integer.parseInt(words[2]));
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("java-example");
        consumer.setNamesrvAddr(words[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(words[1], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                System.out.println("received: " + new String(message.getBody(), StandardCharsets.UTF_8));
                left.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        left.await();
        consumer.shutdown();
    }
}
