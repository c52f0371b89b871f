package interop;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Shortens the stops of RocketMQ's clients and servers, and ends a busy loop; run with a main class and its words, it
 * starts that.
 *
 * <p>A thread that RocketMQ calls NettyEventExecutor polls for 3 s at a time, and whoever stops it waits for the end of its
 * poll: 3 s for each client, 9 s for a broker. This ends the poll of those that were told to stop, and of no others.
 *
 * <p>A broker's TransactionalOpBatchService, which writes that transactions have ended, does so an interval after it has
 * last written. Once that has passed, it looks again and again whether there is something to write, without a pause. To
 * those who wait for the next transaction to end, it is told here that the interval passes in a moment.
 */
public final class QuickStop {
    private static final String SLOW = "NettyEventExecutor";
    private static final String BUSY = "TransactionalOpBatchService";
    private static final long PAUSE_MS = 50;

    private QuickStop() {
    }

    public static void main(String[] words) throws Exception {
        start();
        Object rest = Arrays.copyOfRange(words, 1, words.length);
        Class.forName(words[0]).getMethod("main", String[].class).invoke(null, rest);
    }

    static void start() {
        Thread watcher = new Thread(QuickStop::watch, "QuickStop");
        watcher.setDaemon(true);
        watcher.start();
    }

    private static void watch() {
        try {
            while (true) {
                Thread.sleep(PAUSE_MS);
                for (Thread thread : threads()) {
                    if (thread != null && thread.getName().equals(SLOW) && isStopped(thread)) {
                        thread.interrupt();
                    } else if (thread != null && thread.getName().equals(BUSY)) {
                        pause(task(thread));
                    }
                }
            }
        } catch (ReflectiveOperationException | RuntimeException | InterruptedException failure) {
            failure.printStackTrace(); // another JDK: stops take their time
        }
    }

    /** Let a TransactionalOpBatchService without anything to write wait until the next look of this thread. */
    private static void pause(Object service) throws ReflectiveOperationException {
        if (service == null) {
            return;
        }
        Object config = call("getBrokerConfig", field("brokerController", service));
        long interval = (Integer) call("getTransactionOpBatchInterval", config);
        Map<?, ?> queues = (Map<?, ?>) call("getDeleteContext", field("transactionalMessageService", service));
        for (Object queue : queues.values()) {
            if (((AtomicInteger) call("getTotalSize", queue)).get() == 0) {
                long written = System.currentTimeMillis() - interval + PAUSE_MS;
                queue.getClass().getMethod("setLastWriteTimestamp", long.class).invoke(queue, written);
            }
        }
    }

    private static List<Thread> threads() {
        ThreadGroup group = Thread.currentThread().getThreadGroup();
        Thread[] all = new Thread[2 * group.activeCount() + 8];
        group.enumerate(all);
        return Arrays.asList(all);
    }

    private static boolean isStopped(Thread thread) throws ReflectiveOperationException {
        Object service = task(thread);
        if (service == null) {
            return false;
        }
        return (Boolean) call("isStopped", service);
    }

    /** What a thread runs; null once it has ended. Since Java 19 a holder keeps it. */
    private static Object task(Thread thread) throws ReflectiveOperationException {
        for (Field field : Thread.class.getDeclaredFields()) {
            if (field.getName().equals("target")) {
                return get(field, thread);
            } else if (field.getName().equals("holder")) {
                Object holder = get(field, thread);
                return get(holder.getClass().getDeclaredField("task"), holder);
            }
        }
        throw new NoSuchFieldException("target");
    }

    private static Object call(String method, Object owner) throws ReflectiveOperationException {
        Method found = owner.getClass().getMethod(method);
        found.setAccessible(true);
        return found.invoke(owner);
    }

    private static Object field(String name, Object owner) throws ReflectiveOperationException {
        return get(owner.getClass().getDeclaredField(name), owner);
    }

    private static Object get(Field field, Object owner) throws IllegalAccessException {
        field.setAccessible(true);
        return field.get(owner);
    }
}
