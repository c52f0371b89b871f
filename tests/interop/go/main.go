// A program over RocketMQ's Go client.
//
//	client produce NAME_SERVER TOPIC COUNT               sends in every way the client has, a JSON line a result,
//	                                                     and one with "event": "again" for each send that it repeats
//	client consume NAME_SERVER GROUP TOPIC COUNT EXPRESSION concurrent|orderly|broadcasting FAILURES
//	                                                     a JSON line a delivery, ends after COUNT accepted messages;
//	                                                     EXPRESSION is tags, or SQL92:...; in place of "concurrent",
//	                                                     "replying" answers each message, "traced" leaves a trace;
//	                                                     FAILURES -1: all deliveries fail, with one retry; a new group
//	                                                     begins at the first offset, or where INTEROP_FROM says: last, or
//	                                                     a time as 20060102150405 in UTC
//	client send NAME_SERVER sync|traced|request MESSAGES sends messages given as a JSON list, a JSON line a result;
//	                                                     "traced" does not end by itself
//	client transact NAME_SERVER GROUP TOPIC LOCAL:CHECK...
//	                                                     sends a transactional message for each word, whose listener
//	                                                     answers LOCAL at once and CHECK to each check; a JSON line a
//	                                                     send and one with "event": "check" for each check; never ends
//
// INTEROP_ACCESS_KEY, INTEROP_SECRET_KEY and INTEROP_TOKEN sign all requests of send, produce and consume.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

// How long a request waits for its reply.
const patience = 2 * time.Minute

var output sync.Mutex

func say(fields map[string]interface{}) {
	line, err := json.Marshal(fields)
	check(err)
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(line))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func credentials() primitive.Credentials {
	return primitive.Credentials{
		AccessKey:     os.Getenv("INTEROP_ACCESS_KEY"),
		SecretKey:     os.Getenv("INTEROP_SECRET_KEY"),
		SecurityToken: os.Getenv("INTEROP_TOKEN"),
	}
}

func message(topic, how string, number int) *primitive.Message {
	made := primitive.NewMessage(topic, []byte(fmt.Sprintf("%s %d", how, number)))
	made.WithTag(how).WithKeys([]string{fmt.Sprintf("%s-%d", how, number)})
	made.WithProperty("number", strconv.Itoa(number))
	return made
}

func result(how string, number int, sent *primitive.SendResult) {
	say(map[string]interface{}{
		"how": how, "number": number, "status": int(sent.Status), "msg_id": sent.MsgID, "offset_msg_id": sent.OffsetMsgID,
		"queue": sent.MessageQueue.QueueId, "offset": sent.QueueOffset,
	})
}

// again repeats a send that failed and reports each repetition, since the broker may have stored the message anyway.
// The client waits 3 s for an answer; that cannot be set, and a busy machine can exceed it.
func again(how string, number int, send func() error) {
	err := send()
	for tries := 1; err != nil && tries < 10; tries++ {
		fmt.Fprintln(os.Stderr, err)
		say(map[string]interface{}{"event": "again", "how": how, "number": number})
		err = send()
	}
	check(err)
}

func produce(nameServer, topic string, count int) {
	client, err := rocketmq.NewProducer(
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServer})),
		producer.WithGroupName(topic+"_producer"),
		producer.WithCredentials(credentials()),
		producer.WithRetry(0),
	)
	check(err)
	check(client.Start())
	background := context.Background()
	sendSync := func(how string, number int, messages ...*primitive.Message) {
		again(how, number, func() error {
			sent, err := client.SendSync(background, messages...)
			if err == nil {
				result(how, number, sent)
			}
			return err
		})
	}
	sendAsync := func(number int, made *primitive.Message) {
		again("async", number, func() error {
			done := make(chan error, 1)
			err := client.SendAsync(background, func(_ context.Context, sent *primitive.SendResult, err error) {
				if err == nil {
					result("async", number, sent)
				}
				done <- err
			}, made)
			if err != nil {
				return err
			}
			return <-done
		})
	}
	for number := 0; number < count; number++ {
		sendSync("sync", number, message(topic, "sync", number))
		check(client.SendOneWay(background, message(topic, "oneway", number)))
		say(map[string]interface{}{"how": "oneway"})
	}
	var pending sync.WaitGroup
	for number := 0; number < count; number++ {
		pending.Add(1)
		go func(number int) {
			defer pending.Done()
			sendAsync(number, message(topic, "async", number))
		}(number)
	}
	pending.Wait()
	var batch []*primitive.Message
	for number := 0; number < count; number++ {
		batch = append(batch, message(topic, "batch", number))
	}
	sendSync("batch", 0, batch...)
	sendSync("large", 0, primitive.NewMessage(topic, []byte(strings.Repeat("large ", 100000))))
	check(client.Shutdown())
}

// given is a message as the tests describe it.
type given struct {
	Topic       string            `json:"topic"`
	Body        []byte            `json:"body"`
	Tags        string            `json:"tags"`
	Keys        string            `json:"keys"`
	DelayLevel  int               `json:"delay_level"`
	ShardingKey string            `json:"sharding_key"`
	Properties  map[string]string `json:"properties"`
}

func (g given) message() *primitive.Message {
	made := primitive.NewMessage(g.Topic, g.Body)
	made.WithProperties(g.Properties)
	if g.Tags != "" {
		made.WithTag(g.Tags)
	}
	if g.Keys != "" {
		made.WithKeys([]string{g.Keys})
	}
	if g.DelayLevel != 0 {
		made.WithDelayTimeLevel(g.DelayLevel)
	}
	if g.ShardingKey != "" {
		made.WithShardingKey(g.ShardingKey)
	}
	return made
}

func traceTo(nameServer string) *primitive.TraceConfig {
	return &primitive.TraceConfig{Access: primitive.Local, Resolver: primitive.NewPassthroughResolver([]string{nameServer})}
}

func send(nameServer, how, messages string) {
	var all []given
	check(json.Unmarshal([]byte(messages), &all))
	options := []producer.Option{
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServer})),
		producer.WithGroupName("go_sender"),
		producer.WithCredentials(credentials()),
		producer.WithQueueSelector(producer.NewHashQueueSelector()),
		producer.WithRetry(0),
	}
	if how == "traced" {
		options = append(options, producer.WithTrace(traceTo(nameServer)))
	}
	client, err := rocketmq.NewProducer(options...)
	check(err)
	check(client.Start())
	for number, each := range all {
		again(how, number, func() error {
			if how == "request" {
				reply, err := client.Request(context.Background(), patience, each.message())
				if err == nil {
					say(map[string]interface{}{"how": how, "number": number, "body": string(reply.Body)})
				}
				return err
			}
			sent, err := client.SendSync(context.Background(), each.message())
			if err == nil {
				result(how, number, sent)
			}
			return err
		})
	}
	if how == "traced" {
		select {} // a shutdown would not wait for the trace; whoever started this ends it
	}
	check(client.Shutdown())
}

// reply answers a message. CreateReplyMessage of this client parses the body as properties, so it is set afterwards.
func reply(replier rocketmq.Producer, got *primitive.MessageExt) {
	made, err := consumer.CreateReplyMessage(got, nil)
	check(err)
	made.Body = append([]byte("re: "), got.Body...)
	_, err = replier.SendSync(context.Background(), made)
	check(err)
}

func begin(from string) consumer.Option {
	switch from {
	case "", "first":
		return consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset)
	case "last":
		return consumer.WithConsumeFromWhere(consumer.ConsumeFromLastOffset)
	default:
		return consumer.WithConsumeFromWhere(consumer.ConsumeFromTimestamp)
	}
}

func consume(nameServer, group, topic string, count int, expression, how string, failures int32) {
	options := []consumer.Option{
		consumer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServer})),
		consumer.WithGroupName(group),
		begin(os.Getenv("INTEROP_FROM")),
		consumer.WithConsumeTimestamp(os.Getenv("INTEROP_FROM")), // counts only for such a beginning
		consumer.WithConsumerOrder(how == "orderly"),
		consumer.WithCredentials(credentials()),
	}
	if how == "broadcasting" {
		options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	if how == "traced" {
		options = append(options, consumer.WithTrace(traceTo(nameServer)))
	}
	if failures < 0 {
		options = append(options, consumer.WithMaxReconsumeTimes(1))
	}
	replier, err := rocketmq.NewProducer(
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServer})),
		producer.WithGroupName(group+"_replier"),
		producer.WithCredentials(credentials()), // both share one client
	)
	check(err)
	if how == "replying" {
		check(replier.Start())
	}
	client, err := rocketmq.NewPushConsumer(options...)
	check(err)
	done := make(chan bool, 1)
	accepted := map[string]bool{}
	deliver := func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, got := range messages {
			body := string(got.Body)
			if len(body) > 40 {
				body = body[:40]
			}
			say(map[string]interface{}{
				"topic": got.Topic, "queue": got.Queue.QueueId, "offset": got.QueueOffset, "tags": got.GetTags(),
				"keys": got.GetKeys(), "number": got.GetProperty("number"), "body_bytes": len(got.Body), "body": body,
				"reconsume_times": got.ReconsumeTimes, "msg_id": got.MsgId,
				"born_ms": got.BornTimestamp, "stored_ms": got.StoreTimestamp,
			})
			if how == "replying" {
				reply(replier, got)
			}
			if failures < 0 || got.ReconsumeTimes < failures {
				return consumer.ConsumeRetryLater, nil
			}
			output.Lock()
			known := len(accepted)
			accepted[got.MsgId] = true
			if len(accepted) > known && len(accepted) == count {
				done <- true
			}
			output.Unlock()
		}
		return consumer.ConsumeSuccess, nil
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: expression}
	if strings.HasPrefix(expression, "SQL92:") {
		selector = consumer.MessageSelector{Type: consumer.SQL92, Expression: strings.TrimPrefix(expression, "SQL92:")}
	}
	check(client.Subscribe(topic, selector, deliver))
	check(client.Start())
	say(map[string]interface{}{"event": "started"})
	<-done
	check(client.Shutdown())
}

// seller answers what the properties of a message say.
type seller struct{}

func state(said string) primitive.LocalTransactionState {
	switch said {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	default:
		return primitive.UnknowState
	}
}

func (seller) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	return state(message.GetProperty("local"))
}

func (seller) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	say(map[string]interface{}{"event": "check", "body": string(message.Body)})
	return state(message.GetProperty("check"))
}

func transact(nameServer, group, topic string, outcomes []string) {
	client, err := rocketmq.NewTransactionProducer(
		seller{},
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServer})),
		producer.WithGroupName(group),
		producer.WithRetry(0),
	)
	check(err)
	check(client.Start())
	for number, outcome := range outcomes {
		local, later, _ := strings.Cut(outcome, ":")
		again("transaction", number, func() error {
			made := primitive.NewMessage(topic, []byte(outcome))
			made.WithProperty("local", local)
			made.WithProperty("check", later)
			sent, err := client.SendMessageInTransaction(context.Background(), made)
			if err == nil {
				result("transaction", number, sent.SendResult)
			}
			return err
		})
	}
	select {}
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	check(err)
	return value
}

func main() {
	level := os.Getenv("INTEROP_LOG_LEVEL")
	if level == "" {
		level = "error"
	}
	rlog.SetLogLevel(level)
	words := os.Args[1:]
	switch words[0] {
	case "produce":
		produce(words[1], words[2], number(words[3]))
	case "send":
		send(words[1], words[2], words[3])
	case "consume":
		consume(words[1], words[2], words[3], number(words[4]), words[5], words[6], int32(number(words[7])))
	case "transact":
		transact(words[1], words[2], words[3], words[4:])
	}
}
