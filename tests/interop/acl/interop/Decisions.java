package interop;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.function.Supplier;
import org.apache.rocketmq.auth.authentication.enums.UserStatus;
import org.apache.rocketmq.auth.authentication.enums.UserType;
import org.apache.rocketmq.auth.authentication.exception.AuthenticationException;
import org.apache.rocketmq.auth.authentication.model.Subject;
import org.apache.rocketmq.auth.authentication.model.User;
import org.apache.rocketmq.auth.authentication.provider.AuthenticationMetadataProvider;
import org.apache.rocketmq.auth.authorization.context.DefaultAuthorizationContext;
import org.apache.rocketmq.auth.authorization.enums.Decision;
import org.apache.rocketmq.auth.authorization.enums.PolicyType;
import org.apache.rocketmq.auth.authorization.exception.AuthorizationException;
import org.apache.rocketmq.auth.authorization.model.Acl;
import org.apache.rocketmq.auth.authorization.model.Environment;
import org.apache.rocketmq.auth.authorization.model.Policy;
import org.apache.rocketmq.auth.authorization.model.PolicyEntry;
import org.apache.rocketmq.auth.authorization.model.Resource;
import org.apache.rocketmq.auth.authorization.provider.AuthorizationMetadataProvider;
import org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider;
import org.apache.rocketmq.auth.config.AuthConfig;
import org.apache.rocketmq.common.action.Action;
import org.apache.rocketmq.common.resource.ResourcePattern;
import org.apache.rocketmq.common.resource.ResourceType;

/**
 * RocketMQ's decisions: a user, his policies and a question a line of JSON in; a line with "allowed", "denied",
 * "unmatched" or "disabled" out. Ends with its input.
 */
public final class Decisions {
    private static User user;
    private static Acl acl;

    public static void main(String[] none) throws Exception {
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
        System.setOut(System.err);
        AuthConfig config = new AuthConfig();
        config.setConfigName("interop");
        config.setAuthenticationMetadataProvider(Users.class.getName());
        config.setAuthorizationMetadataProvider(Acls.class.getName());
        DefaultAuthorizationProvider provider = new DefaultAuthorizationProvider();
        provider.initialize(config);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            out.println(decide(provider, JSON.parseObject(line)));
        }
        out.flush();
        Runtime.getRuntime().halt(0);
    }

    private static String decide(DefaultAuthorizationProvider provider, JSONObject said) {
        user = User.of("alice", "", said.getBooleanValue("super") ? UserType.SUPER : UserType.NORMAL);
        user.setUserStatus(said.getBooleanValue("disabled") ? UserStatus.DISABLE : UserStatus.ENABLE);
        List<Policy> policies = new ArrayList<>();
        policies.add(Policy.of(PolicyType.CUSTOM, entries(said.getJSONArray("custom"))));
        policies.add(Policy.of(PolicyType.DEFAULT, entries(said.getJSONArray("default"))));
        acl = Acl.of(user, policies);
        ResourceType type = ResourceType.getByName(said.getString("type"));
        Resource resource = Resource.of(type, said.getString("name"), ResourcePattern.LITERAL);
        Action action = Action.getByName(said.getString("action"));
        try {
            String address = said.getString("address");
            provider.authorize(DefaultAuthorizationContext.of(user, resource, action, address)).join();
            return "allowed";
        } catch (CompletionException | AuthorizationException | AuthenticationException error) {
            Throwable cause = error instanceof CompletionException ? error.getCause() : error;
            String text = String.valueOf(cause.getMessage());
            if (text.endsWith("the decision is deny.")) {
                return "denied";
            }
            return text.endsWith("no matched policies.") ? "unmatched" : text.endsWith("is disabled.") ? "disabled" : text;
        }
    }

    private static List<PolicyEntry> entries(JSONArray said) {
        List<PolicyEntry> found = new ArrayList<>();
        for (int number = 0; number < said.size(); number++) {
            JSONObject entry = said.getJSONObject(number);
            List<Action> actions = new ArrayList<>();
            entry.getList("actions", String.class).forEach(name -> actions.add(Action.getByName(name)));
            Environment environment = Environment.of(entry.getList("networks", String.class));
            Decision decision = Decision.getByName(entry.getString("decision"));
            found.add(PolicyEntry.of(Resource.of(entry.getString("resource")), actions, environment, decision));
        }
        return found;
    }

    /** Knows one user. */
    public static final class Users implements AuthenticationMetadataProvider {
        @Override
        public void initialize(AuthConfig config, Supplier<?> service) {
        }

        @Override
        public void shutdown() {
        }

        @Override
        public CompletableFuture<Void> createUser(User added) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Void> deleteUser(String name) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Void> updateUser(User changed) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<User> getUser(String name) {
            return CompletableFuture.completedFuture(user);
        }

        @Override
        public CompletableFuture<List<User>> listUser(String filter) {
            throw new UnsupportedOperationException();
        }
    }

    /** Knows the policies of that user. */
    public static final class Acls implements AuthorizationMetadataProvider {
        @Override
        public void initialize(AuthConfig config, Supplier<?> service) {
        }

        @Override
        public void shutdown() {
        }

        @Override
        public CompletableFuture<Void> createAcl(Acl added) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Void> deleteAcl(Subject subject) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Void> updateAcl(Acl changed) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Acl> getAcl(Subject subject) {
            return CompletableFuture.completedFuture(acl);
        }

        @Override
        public CompletableFuture<List<Acl>> listAcl(String subjectFilter, String resourceFilter) {
            throw new UnsupportedOperationException();
        }
    }
}
