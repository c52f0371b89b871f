package interop;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.List;

/**
 * Shortens the stops of RocketMQ's clients and servers; run with a main class and its words, it starts that.
 *
 * <p>A thread that RocketMQ calls NettyEventExecutor polls for 3 s at a time, and whoever stops it waits for the end of its
 * poll: 3 s for each client, 9 s for a broker. This ends the poll of those that were told to stop, and of no others.
 */
public final class QuickStop {
    private static final String SLOW = "NettyEventExecutor";
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
                    }
                }
            }
        } catch (ReflectiveOperationException | RuntimeException | InterruptedException failure) {
            failure.printStackTrace(); // another JDK: stops take their time
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
        Method isStopped = service.getClass().getMethod("isStopped");
        isStopped.setAccessible(true);
        return (Boolean) isStopped.invoke(service);
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

    private static Object get(Field field, Object owner) throws IllegalAccessException {
        field.setAccessible(true);
        return field.get(owner);
    }
}
