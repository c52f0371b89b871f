package interop;

import java.security.Principal;
import java.util.Map;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.http.server.ServerHttpRequest;
import org.springframework.messaging.simp.SimpMessagingTemplate;
import org.springframework.messaging.simp.broker.BrokerAvailabilityEvent;
import org.springframework.context.event.EventListener;
import org.springframework.messaging.simp.config.MessageBrokerRegistry;
import org.springframework.messaging.simp.user.SimpUserRegistry;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.PostMapping;
import org.springframework.web.bind.annotation.RequestParam;
import org.springframework.web.bind.annotation.RestController;
import org.springframework.web.socket.WebSocketHandler;
import org.springframework.web.socket.config.annotation.EnableWebSocketMessageBroker;
import org.springframework.web.socket.config.annotation.StompEndpointRegistry;
import org.springframework.web.socket.config.annotation.WebSocketMessageBrokerConfigurer;
import org.springframework.web.socket.server.support.DefaultHandshakeHandler;

/**
 * A web application as Spring's manual shows it: browsers connect to /ws, the relay has a connection to the broker for
 * each of them and one of its own, and an instance asks the others about users that it does not have.
 */
@SpringBootApplication(proxyBeanMethods = false)
public class RelayApplication {
    public static void main(String[] words) {
        SpringApplication.run(RelayApplication.class, words);
    }

    /** What it relays, and where. */
    @org.springframework.context.annotation.Configuration(proxyBeanMethods = false)
    @EnableWebSocketMessageBroker
    static class Relay implements WebSocketMessageBrokerConfigurer {
        private final int brokerPort;

        Relay(@Value("${broker.port}") int brokerPort) {
            this.brokerPort = brokerPort;
        }

        @Override
        public void configureMessageBroker(MessageBrokerRegistry registry) {
            registry.setApplicationDestinationPrefixes("/app");
            registry.enableStompBrokerRelay("/queue", "/topic")
                .setRelayHost("127.0.0.1")
                .setRelayPort(brokerPort)
                // Not with a broadcast of the users as well: an instance that learns of a user while its own question
                // comes back to it answers that too, so that the user gets a message twice.
                .setUserDestinationBroadcast("/topic/unresolved-user");
        }

        @Override
        public void registerStompEndpoints(StompEndpointRegistry registry) {
            registry.addEndpoint("/ws").setHandshakeHandler(new DefaultHandshakeHandler() {
                @Override
                protected Principal determineUser(ServerHttpRequest request, WebSocketHandler handler, Map<String, Object> attributes) {
                    String user = request.getURI().getQuery();
                    return () -> user;
                }
            });
        }
    }

    /** What the application sends, when it is asked to over HTTP. */
    @RestController
    static class Sender {
        private final SimpMessagingTemplate template;
        private final SimpUserRegistry users;
        private volatile boolean available;

        Sender(SimpMessagingTemplate template, SimpUserRegistry users) {
            this.template = template;
            this.users = users;
        }

        @EventListener
        void changed(BrokerAvailabilityEvent event) {
            available = event.isBrokerAvailable();
        }

        /** Returns how many users this instance has; -1 while the broker is away. */
        @GetMapping("/users")
        String users() {
            return Integer.toString(available ? users.getUserCount() : -1);
        }

        @PostMapping("/user")
        void toUser(@RequestParam("name") String name, @RequestParam("text") String text) {
            template.convertAndSendToUser(name, "/queue/notify", text);
        }

        @PostMapping("/all")
        void toAll(@RequestParam("text") String text) {
            template.convertAndSend("/topic/news", text);
        }
    }
}
