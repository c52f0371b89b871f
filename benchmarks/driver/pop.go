package main

// Pops a backlog and acknowledges each message with a request of its own, as RocketMQ's Java client does.

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	invisibleMs = 60_000
	popOpaque   = 1 // of pops; acknowledgements have 2
	ackOpaque   = 2
)

var (
	startInfo = regexp.MustCompile(`"startOffsetInfo":"([^"]*)"`)
)

// pop keeps window pops under way on each connection until count messages were popped and acknowledged.
func pop(out result) {
	var popped, acked, refused int64
	var wait sync.WaitGroup
	start := time.Now()
	deadline := start.Add(time.Duration(*seconds * float64(time.Second)))
	for i := 0; i < *conns; i++ {
		wait.Add(1)
		go func() {
			defer wait.Done()
			p := popper{conn: dial(), until: deadline, popped: &popped, acked: &acked, refused: &refused}
			p.run()
			p.conn.Close()
		}()
	}
	wait.Wait()
	took := time.Since(start).Seconds()
	out["messages"], out["acked"], out["refused"], out["secs"] = popped, acked, refused, took
	out["rate"] = float64(acked) / took
}

// popMode makes push consumers of the group that do not rebalance themselves pop the topic.
func popMode(out result) {
	c := dial()
	defer c.Close()
	body := fmt.Sprintf(`{"topic":%q,"consumerGroup":%q,"mode":"POP","popShareQueueNum":0}`, *topic, *group)
	if a, err := ask(c, setRequestMode, nil, []byte(body)); err != nil || a.code != 0 {
		fail(fmt.Errorf("request mode of group %s was not set: code %d, %v", *group, a.code, err))
	}
	out["group"] = *group
}

type popper struct {
	conn                   net.Conn
	until                  time.Time
	popped, acked, refused *int64
	pops, acks             int // under way
	out                    []byte
}

func (p *popper) run() {
	reader := bufio.NewReaderSize(p.conn, 1<<18)
	var buffer []byte
	for {
		for p.pops < *window && time.Now().Before(p.until) && atomic.LoadInt64(p.popped) < int64(*count) {
			p.pops++
			p.out = append(p.out, popFrame()...)
		}
		if len(p.out) > 0 {
			if _, err := p.conn.Write(p.out); err != nil {
				fail(err)
			}
			p.out = p.out[:0]
		}
		if p.pops == 0 && p.acks == 0 {
			return
		}
		for {
			a, b, err := readAnswer(reader, buffer)
			if err != nil {
				fail(err)
			}
			buffer = b
			p.take(a)
			if reader.Buffered() < 8 {
				break
			}
		}
	}
}

func popFrame() []byte {
	kind, expression := "TAG", *tags
	if *sql != "" {
		kind, expression = "SQL92", *sql
	}
	return encodeFrame(popMessage, strconv.Itoa(popOpaque), []field{{"consumerGroup", *group}, {"topic", *topic},
		{"queueId", "-1"}, {"maxMsgNums", strconv.Itoa(*most)}, {"invisibleTime", strconv.Itoa(invisibleMs)},
		{"pollTime", "0"}, {"bornTime", strconv.FormatInt(time.Now().UnixMilli(), 10)}, {"initMode", "0"},
		{"expType", kind}, {"exp", expression}, {"order", "false"}}, nil)
}

func (p *popper) take(a answer) {
	switch {
	case a.opaque == ackOpaque:
		p.acks--
		if a.code == 0 {
			atomic.AddInt64(p.acked, 1)
		} else {
			atomic.AddInt64(p.refused, 1)
		}
	case a.code == 0:
		p.pops--
		p.acknowledge(a)
	default:
		p.pops--
	}
}

// acknowledge appends a request for each message of a pop; its handle consists of what the answer says of its queue.
func (p *popper) acknowledge(a answer) {
	found := startInfo.FindSubmatch(a.header)
	if found == nil {
		fail(fmt.Errorf("pop answer without startOffsetInfo: %s", a.header))
	}
	starts := map[uint32]string{}
	for _, each := range strings.Split(string(found[1]), ";") {
		words := strings.Fields(each)
		queue, err := strconv.Atoi(words[1])
		if err != nil {
			fail(err)
		}
		starts[uint32(queue)] = words[2]
	}
	common := fmt.Sprintf("%d %d %d 0 bench", after(a.header, `"popTime":`), after(a.header, `"invisibleTime":`),
		after(a.header, `"reviveQid":`))
	for body := a.body; len(body) >= 48; body = body[binary.BigEndian.Uint32(body):] {
		queue, offset := binary.BigEndian.Uint32(body[12:]), binary.BigEndian.Uint64(body[20:])
		handle := fmt.Sprintf("%s %s %d %d", starts[queue], common, queue, offset)
		p.acks++
		atomic.AddInt64(p.popped, 1)
		p.out = append(p.out, encodeFrame(ackMessage, strconv.Itoa(ackOpaque), []field{{"consumerGroup", *group},
			{"topic", *topic}, {"queueId", fmt.Sprint(queue)}, {"extraInfo", handle}, {"offset", fmt.Sprint(offset)}}, nil)...)
	}
}
