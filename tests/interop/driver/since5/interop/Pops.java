package interop;

import com.alibaba.fastjson.JSONObject;
import java.nio.ByteBuffer;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.consumer.PopStatus;
import org.apache.rocketmq.client.impl.mqclient.MQClientAPIExt;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.remoting.CommandCustomHeader;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.NotificationRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PeekMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PollingInfoRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/** The requests of POP that no push consumer sends, or not in this way, through the client library of RocketMQ 5. */
final class Pops implements Driver.Commands {
    private static final int POLL_MARGIN_MS = 60_000;

    private final Map<String, MQClientAPIExt> clients = new ConcurrentHashMap<>();

    @Override
    public void register(Map<String, Driver.Command> commands) {
        commands.put("pops.start", this::start);
        commands.put("pops.pop", this::pop);
        commands.put("pops.ack", this::ack);
        commands.put("pops.change", this::change);
        commands.put("pops.notify", this::waitForMessages);
        commands.put("pops.peek", this::peek);
        commands.put("pops.waiting", this::waiting);
        commands.put("pops.stop", this::stop);
    }

    private Object start(JSONObject said) {
        ClientConfig config = new ClientConfig();
        Settings.apply(config, said);
        MQClientAPIExt client = new MQClientAPIExt(config, new NettyClientConfig(), null, null);
        client.start();
        clients.put(said.getString("name"), client);
        return true;
    }

    private MQClientAPIExt of(JSONObject said) {
        return clients.get(said.getString("name"));
    }

    private Object pop(JSONObject said) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(said.getString("group"));
        header.setTopic(said.getString("topic"));
        header.setQueueId(said.getIntValue("queue"));
        header.setMaxMsgNums(said.getIntValue("count"));
        header.setInvisibleTime(said.getLongValue("invisible_ms"));
        header.setPollTime(said.getLongValue("poll_ms"));
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(0);
        header.setExpType("TAG");
        header.setExp("*");
        header.setOrder(said.getBooleanValue("order"));
        long limitMs = said.getLongValue("poll_ms") + POLL_MARGIN_MS;
        PopResult result = of(said).popMessageAsync(
            said.getString("broker_address"), said.getString("broker"), header, limitMs).get();
        return result.getPopStatus() == PopStatus.FOUND ? Messages.show(result.getMsgFoundList()) : List.of();
    }

    private Object ack(JSONObject said) throws Exception {
        List<String> handles = said.getJSONArray("handles").toJavaList(String.class);
        String address = said.getString("broker_address");
        if (handles.size() > 1) {
            return shown(of(said).batchAckMessageAsync(
                address, said.getString("topic"), said.getString("group"), handles, Settings.PATIENCE_MS).get());
        }
        String[] parts = ExtraInfoUtil.split(handles.get(0));
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setConsumerGroup(said.getString("group"));
        header.setTopic(said.getString("topic"));
        header.setQueueId(ExtraInfoUtil.getQueueId(parts));
        header.setOffset(ExtraInfoUtil.getQueueOffset(parts));
        header.setExtraInfo(handles.get(0));
        return shown(of(said).ackMessageAsync(address, header, Settings.PATIENCE_MS).get());
    }

    private Object change(JSONObject said) throws Exception {
        String handle = said.getString("handle");
        String[] parts = ExtraInfoUtil.split(handle);
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setConsumerGroup(said.getString("group"));
        header.setTopic(said.getString("topic"));
        header.setQueueId(ExtraInfoUtil.getQueueId(parts));
        header.setOffset(ExtraInfoUtil.getQueueOffset(parts));
        header.setExtraInfo(handle);
        header.setInvisibleTime(said.getLongValue("invisible_ms"));
        return shown(of(said).changeInvisibleTimeAsync(
            said.getString("broker_address"), said.getString("broker"), header, Settings.PATIENCE_MS).get());
    }

    private static Map<String, Object> shown(AckResult result) {
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("status", String.valueOf(result.getStatus()));
        shown.put("handle", result.getExtraInfo());
        return shown;
    }

    private Object waitForMessages(JSONObject said) throws Exception {
        NotificationRequestHeader header = new NotificationRequestHeader();
        header.setConsumerGroup(said.getString("group"));
        header.setTopic(said.getString("topic"));
        header.setQueueId(said.getIntValue("queue"));
        header.setPollTime(said.getLongValue("poll_ms"));
        header.setBornTime(System.currentTimeMillis());
        return of(said).notification(
            said.getString("broker_address"), header, said.getLongValue("poll_ms") + POLL_MARGIN_MS).get();
    }

    private Object peek(JSONObject said) throws Exception {
        PeekMessageRequestHeader header = new PeekMessageRequestHeader();
        header.setConsumerGroup(said.getString("group"));
        header.setTopic(said.getString("topic"));
        header.setQueueId(said.getIntValue("queue"));
        header.setMaxMsgNums(said.getIntValue("count"));
        RemotingCommand answer = ask(said, RequestCode.PEEK_MESSAGE, header);
        return answer.getBody() == null ? List.of() : Messages.show(MessageDecoder.decodes(ByteBuffer.wrap(answer.getBody())));
    }

    private Object waiting(JSONObject said) throws Exception {
        PollingInfoRequestHeader header = new PollingInfoRequestHeader();
        header.setConsumerGroup(said.getString("group"));
        header.setTopic(said.getString("topic"));
        header.setQueueId(said.getIntValue("queue"));
        return Integer.valueOf(ask(said, RequestCode.POLLING_INFO, header).getExtFields().get("pollingNum"));
    }

    /** Send a request for which the library has a header, but no method. */
    private RemotingCommand ask(JSONObject said, int code, CommandCustomHeader header) throws Exception {
        RemotingCommand request = RemotingCommand.createRequestCommand(code, header);
        return of(said).getRemotingClient().invokeSync(said.getString("broker_address"), request, Settings.PATIENCE_MS);
    }

    private Object stop(JSONObject said) {
        clients.remove(said.getString("name")).shutdown();
        return true;
    }
}
