package interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.FileOutputStream;
import java.io.FileDescriptor;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Steers RocketMQ clients by lines of JSON: a command a line in, an answer or an event a line out.
 *
 * <p>A command is {"id": 1, "do": "producer.start", ...}; its answer repeats the id. Commands run side by side, so one that
 * waits does not hold up the others. The program ends with its input, and takes its clients with it.
 */
public final class Driver {
    /** What a command does with its arguments; what it returns becomes the answer. */
    interface Command {
        Object run(JSONObject arguments) throws Exception;
    }

    /** Adds commands by their names. */
    interface Commands {
        void register(Map<String, Command> commands);
    }

    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    private Driver() {
    }

    public static void main(String[] none) throws Exception {
        System.setOut(System.err);
        QuickStop.start();
        Map<String, Command> commands = new LinkedHashMap<>();
        new Producers().register(commands);
        new Transactions().register(commands);
        new PushConsumers().register(commands);
        new LitePulls().register(commands);
        new Queries().register(commands);
        new AdminTool().register(commands);
        new Monitoring().register(commands);
        registerSince5("interop.Pops", commands);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        ExecutorService threads = Executors.newCachedThreadPool();
        emit(Map.of("event", "ready"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject command = JSON.parseObject(line);
            threads.execute(() -> answer(commands, command));
        }
        Runtime.getRuntime().halt(0);
    }

    /** Add the commands of a class that is compiled only with a client of RocketMQ 5 or later. */
    private static void registerSince5(String name, Map<String, Command> commands) throws ReflectiveOperationException {
        Class<?> found;
        try {
            found = Class.forName(name);
        } catch (ClassNotFoundException older) {
            return;
        }
        ((Commands) found.getDeclaredConstructor().newInstance()).register(commands);
    }

    private static void answer(Map<String, Command> commands, JSONObject command) {
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("id", command.getIntValue("id"));
        try {
            Command known = commands.get(command.getString("do"));
            if (known == null) {
                throw new IllegalArgumentException("no command " + command.getString("do"));
            }
            answer.put("result", known.run(command));
        } catch (Throwable failure) {
            answer.put("error", Failures.describe(failure));
        }
        emit(answer);
    }

    /** Print one line for the other side. */
    static void emit(Map<String, ?> event) {
        String line = JSON.toJSONString(event, SerializerFeature.DisableCircularReferenceDetect);
        synchronized (OUT) {
            OUT.println(line);
            OUT.flush();
        }
    }

    /** Failures as data: the class, RocketMQ's response code (-1 without one) and the text. */
    static final class Failures {
        private Failures() {
        }

        static Map<String, Object> describe(Throwable failure) {
            Throwable cause = failure instanceof InvocationTargetException ? failure.getCause() : failure;
            Map<String, Object> said = new LinkedHashMap<>();
            said.put("type", cause.getClass().getSimpleName());
            said.put("code", code(cause));
            said.put("message", String.valueOf(cause.getMessage()));
            return said;
        }

        private static int code(Throwable failure) {
            if (failure instanceof org.apache.rocketmq.client.exception.MQBrokerException) {
                return ((org.apache.rocketmq.client.exception.MQBrokerException) failure).getResponseCode();
            }
            if (failure instanceof org.apache.rocketmq.client.exception.MQClientException) {
                return ((org.apache.rocketmq.client.exception.MQClientException) failure).getResponseCode();
            }
            return -1;
        }
    }
}
