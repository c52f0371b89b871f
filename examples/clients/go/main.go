// Prints the bodies of COUNT messages: consume NAME_SERVER TOPIC COUNT.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

func main() {
	rlog.SetLogLevel("error")
	count, err := strconv.Atoi(os.Args[3])
	check(err)
	bodies := make(chan string)
	client, err := rocketmq.NewPushConsumer(
		consumer.WithNsResolver(primitive.NewPassthroughResolver([]string{os.Args[1]})),
		consumer.WithGroupName("go-example"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	)
	check(err)
	take := func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, message := range messages {
			bodies <- string(message.Body)
		}
		return consumer.ConsumeSuccess, nil
	}
	check(client.Subscribe(os.Args[2], consumer.MessageSelector{}, take))
	check(client.Start())
	for ; count > 0; count-- {
		fmt.Println("received:", <-bodies)
	}
	check(client.Shutdown())
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
