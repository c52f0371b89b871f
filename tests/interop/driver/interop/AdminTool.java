package interop;

import com.alibaba.fastjson.JSONObject;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** The official admin tool, a command at a time in this process: its output is the answer. */
final class AdminTool {
    void register(Map<String, Driver.Command> commands) {
        commands.put("mqadmin", this::run);
    }

    private synchronized Object run(JSONObject said) throws Exception {
        forgetCommands();
        List<String> words = said.getJSONArray("words").toJavaList(String.class);
        ByteArrayOutputStream text = new ByteArrayOutputStream();
        PrintStream before = System.out;
        PrintStream capture = new PrintStream(text, true, StandardCharsets.UTF_8);
        System.setOut(capture);
        System.setErr(capture);
        try {
            MQAdminStartup.main0(words.toArray(new String[0]), Settings.hook(said));
        } finally {
            System.setOut(before);
            System.setErr(before);
        }
        return text.toString(StandardCharsets.UTF_8);
    }

    /** The tool adds its commands to a list at each call; without this the ones of the call before would be found. */
    private static void forgetCommands() throws ReflectiveOperationException {
        Field commands = MQAdminStartup.class.getDeclaredField(fieldName());
        commands.setAccessible(true);
        ((List<?>) commands.get(null)).clear();
    }

    private static String fieldName() {
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {
            if (List.class.isAssignableFrom(field.getType())) {
                return field.getName();
            }
        }
        throw new IllegalStateException("the admin tool has no list of commands");
    }
}
