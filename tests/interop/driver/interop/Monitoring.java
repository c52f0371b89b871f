package interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.lang.reflect.Method;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** What RocketMQ's exporter and dashboard ask: any method of the admin client by its name, over one open connection. */
final class Monitoring {
    private final Map<String, DefaultMQAdminExt> admins = new ConcurrentHashMap<>();

    void register(Map<String, Driver.Command> commands) {
        commands.put("monitor.start", this::start);
        commands.put("monitor.call", this::call);
        commands.put("monitor.stop", this::stop);
    }

    private Object start(JSONObject said) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt((long) Settings.PATIENCE_MS);
        Settings.apply(admin, said);
        admin.start();
        Settings.bePatient(admin);
        admins.put(said.getString("name"), admin);
        return true;
    }

    private Object call(JSONObject said) throws Exception {
        DefaultMQAdminExt admin = admins.get(said.getString("name"));
        JSONArray given = said.getJSONArray("arguments");
        for (Method method : DefaultMQAdminExt.class.getMethods()) {
            Class<?>[] types = method.getParameterTypes();
            if (!method.getName().equals(said.getString("method")) || types.length != given.size() || !fits(types, given)) {
                continue;
            }
            Object[] arguments = new Object[types.length];
            for (int i = 0; i < types.length; i++) {
                arguments[i] = given.getObject(i, types[i]);
            }
            // The keys of its tables are objects, such as queues.
            return JSON.parse(JSON.toJSONString(method.invoke(admin, arguments),
                SerializerFeature.WriteNonStringKeyAsString, SerializerFeature.DisableCircularReferenceDetect));
        }
        throw new IllegalArgumentException("the admin client has no method " + said.getString("method") + " for " + given);
    }

    private static boolean fits(Class<?>[] types, JSONArray given) {
        for (int i = 0; i < types.length; i++) {
            if ((types[i] == String.class) != (given.get(i) instanceof String)) {
                return false;
            }
        }
        return true;
    }

    private Object stop(JSONObject said) {
        admins.remove(said.getString("name")).shutdown();
        return true;
    }
}
