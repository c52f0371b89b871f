// A lean load driver for brokers that speak RocketMQ remoting: standard library only.
//
//	go build -o driver . && ./driver -addr 127.0.0.1:10911 -cmd send -conns 4 -window 16 -count 400000
//
// It prints one JSON object. An answer with another code than SUCCESS counts as refused, never as sent.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

var (
	addr       = flag.String("addr", "127.0.0.1:10911", "the broker, HOST:PORT")
	command    = flag.String("cmd", "send", "create, send, rate, pull, pop, popmode, tail, idle or first")
	conns      = flag.Int("conns", 1, "connections")
	window     = flag.Int("window", 16, "requests under way a connection")
	count      = flag.Int("count", 100000, "messages in all")
	seconds    = flag.Float64("secs", 30, "stop after so long whatever was done")
	bodyBytes  = flag.Int("body", 1024, "body bytes")
	topic      = flag.String("topic", "BenchTopic", "topic; with -topics above 1 a number is put behind it")
	group      = flag.String("group", "bench-pop", "pop, popmode: consumer group")
	topics     = flag.Int("topics", 1, "topics")
	queues     = flag.Int("queues", 16, "queues a topic")
	perSecond  = flag.Float64("rate", 2000, "rate: messages a second")
	most       = flag.Int("most", 32, "pull: messages a pull")
	tags       = flag.String("tags", "*", "pull: tag expression")
	sql        = flag.String("sql", "", "pull: SQL92 expression instead of tags")
	spread     = flag.Int("spread", 0, "sends: messages have the property a, 0 to this number less one in turn")
	delayLevel = flag.Int("level", 0, "sends: delay level")
)

type result map[string]any

func dial() net.Conn {
	c, err := net.DialTimeout("tcp", *addr, 10*time.Second)
	if err != nil {
		fail(err)
	}
	return c
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "driver:", err)
	os.Exit(1)
}

func topicName(i int) string {
	if *topics == 1 {
		return *topic
	}
	return fmt.Sprintf("%s-%d", *topic, i)
}

func percentiles(out result, prefix string, micros []uint32) {
	if len(micros) == 0 {
		return
	}
	sort.Slice(micros, func(i, j int) bool { return micros[i] < micros[j] })
	for name, part := range map[string]float64{"p50": 0.5, "p99": 0.99, "p999": 0.999} {
		out[prefix+name] = micros[int(part*float64(len(micros)-1))]
	}
	out[prefix+"max"] = micros[len(micros)-1]
}

func micros(since time.Time) uint32 { return uint32(time.Since(since) / time.Microsecond) }

func create(out result) {
	c := dial()
	defer c.Close()
	for i := 0; i < *topics; i++ {
		q := fmt.Sprint(*queues)
		a, err := ask(c, createTopic, []field{{"topic", topicName(i)}, {"defaultTopic", "TBW102"}, {"readQueueNums", q},
			{"writeQueueNums", q}, {"perm", "6"}, {"topicFilterType", "SINGLE_TAG"}, {"topicSysFlag", "0"}, {"order", "false"}}, nil)
		if err != nil || a.code != 0 {
			fail(fmt.Errorf("topic %s was not created: code %d, %v", topicName(i), a.code, err))
		}
	}
	out["created"] = *topics
}

// sendTemplates has a template for each queue of each topic, and for each value of the property a.
func sendTemplates() []*template {
	var all []*template
	level := ""
	if *delayLevel > 0 {
		level = fmt.Sprintf("\x02DELAY\x01%d", *delayLevel)
	}
	for a := 0; a < max(*spread, 1); a++ {
		more := level
		if *spread > 0 {
			more += fmt.Sprintf("\x02a\x01%d", a)
		}
		for i := 0; i < *topics; i++ {
			for q := 0; q < min(*queues, 16); q++ {
				all = append(all, sendTemplate(topicName(i), q, *bodyBytes, more))
			}
		}
	}
	return all
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

func max(a, b int) int { return -min(-a, -b) }

var uniq = uint64(time.Now().UnixNano())

// send keeps window requests under way on each connection until count were answered.
func send(out result) {
	all := sendTemplates()
	var left, sent, refused int64 = int64(*count), 0, 0
	var wait sync.WaitGroup
	taken := make([][]uint32, *conns)
	start := time.Now()
	deadline := start.Add(time.Duration(*seconds * float64(time.Second)))
	for i := 0; i < *conns; i++ {
		wait.Add(1)
		go func(i int) {
			defer wait.Done()
			taken[i] = sendOn(all, i, &left, &sent, &refused, deadline)
		}(i)
	}
	wait.Wait()
	took := time.Since(start).Seconds()
	var latencies []uint32
	for _, t := range taken {
		latencies = append(latencies, t...)
	}
	out["sent"], out["refused"], out["secs"] = sent, refused, took
	out["rate"] = float64(sent) / took
	percentiles(out, "us_", latencies)
}

func sendOn(all []*template, i int, left, sent, refused *int64, deadline time.Time) []uint32 {
	c := dial()
	defer c.Close()
	reader := bufio.NewReaderSize(c, 1<<17)
	began := make([]time.Time, *window)
	free := make([]uint32, *window)
	for j := range free {
		free[j] = uint32(j)
	}
	var latencies []uint32
	var out, buffer []byte
	at := i * 7919
	for {
		out = out[:0]
		stop := time.Now().After(deadline)
		for len(free) > 0 && !stop && atomic.AddInt64(left, -1) >= 0 {
			slot := free[len(free)-1]
			free = free[:len(free)-1]
			at++
			now := time.Now()
			out = all[at%len(all)].appendTo(out, slot, atomic.AddUint64(&uniq, 1), 0, uint64(now.UnixMilli()))
			began[slot] = now
		}
		if len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				fail(err)
			}
		} else if len(free) == *window {
			return latencies
		}
		for {
			a, b, err := readAnswer(reader, buffer)
			if err != nil {
				fail(err)
			}
			buffer = b
			latencies = append(latencies, micros(began[a.opaque]))
			free = append(free, a.opaque)
			if a.code == 0 {
				atomic.AddInt64(sent, 1)
			} else {
				atomic.AddInt64(refused, 1)
			}
			if reader.Buffered() < 8 {
				break
			}
		}
	}
}

// rate sends at a fixed budget (open loop) and measures from when each was due.
func rate(out result) {
	c := dial()
	defer c.Close()
	all := sendTemplates()
	gap := time.Duration(float64(time.Second) / *perSecond)
	total := int(*perSecond * *seconds)
	due := make([]time.Time, total)
	latencies := make([]uint32, 0, total)
	done := make(chan int)
	go func() {
		reader := bufio.NewReaderSize(c, 1<<16)
		var buffer []byte
		refused := 0
		for i := 0; i < total; i++ {
			a, b, err := readAnswer(reader, buffer)
			if err != nil {
				fail(err)
			}
			buffer = b
			if a.code != 0 {
				refused++
			}
			latencies = append(latencies, micros(due[a.opaque]))
		}
		done <- refused
	}()
	start := time.Now()
	var frame []byte
	for i := 0; i < total; i++ {
		due[i] = start.Add(time.Duration(i) * gap)
		if ahead := time.Until(due[i]); ahead > 0 {
			time.Sleep(ahead)
			due[i] = time.Now() // a sleep that came late is not the broker's delay
		}
		frame = all[i%len(all)].appendTo(frame[:0], uint32(i), atomic.AddUint64(&uniq, 1), 0, uint64(time.Now().UnixMilli()))
		if _, err := c.Write(frame); err != nil {
			fail(err)
		}
	}
	out["refused"], out["sent"] = <-done, total
	percentiles(out, "us_", latencies)
}

// pull walks the backlog of every queue from its start, window pulls under way a connection.
func pull(out result) {
	var got, pulls, scanned, volume int64
	var wait sync.WaitGroup
	taken := make([][]uint32, *conns)
	start := time.Now()
	deadline := start.Add(time.Duration(*seconds * float64(time.Second)))
	for i := 0; i < *conns; i++ {
		wait.Add(1)
		go func(i int) {
			defer wait.Done()
			taken[i] = pullOn(i, &got, &pulls, &scanned, &volume, deadline)
		}(i)
	}
	wait.Wait()
	took := time.Since(start).Seconds()
	var latencies []uint32
	for _, t := range taken {
		latencies = append(latencies, t...)
	}
	out["messages"], out["pulls"], out["scanned"], out["secs"] = got, pulls, scanned, took
	out["rate"], out["scan_rate"], out["mb_per_s"] = float64(got)/took, float64(scanned)/took, float64(volume)/took/1e6
	percentiles(out, "us_", latencies)
}

func pullOn(conn int, got, pulls, scanned, volume *int64, deadline time.Time) []uint32 {
	c := dial()
	defer c.Close()
	reader := bufio.NewReaderSize(c, 1<<18)
	var mine []int
	for q := conn; q < *queues; q += *conns {
		mine = append(mine, q)
	}
	templates := make([]*template, *queues)
	offsets := make([]uint64, *queues)
	began := make([]time.Time, *queues)
	for _, q := range mine {
		templates[q] = pullTemplate(*topic, q, *most, 0)
	}
	var latencies []uint32
	var out, buffer []byte
	underWay := 0
	next := append([]int(nil), mine...)
	for {
		out = out[:0]
		for underWay < *window && len(next) > 0 && time.Now().Before(deadline) && atomic.LoadInt64(got) < int64(*count) {
			q := next[0]
			next = next[1:]
			out = templates[q].appendTo(out, uint32(q), 0, offsets[q], 0)
			began[q] = time.Now()
			underWay++
		}
		if len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				fail(err)
			}
		}
		if underWay == 0 {
			return latencies
		}
		a, b, err := readAnswer(reader, buffer)
		if err != nil {
			fail(err)
		}
		buffer = b
		underWay--
		q := int(a.opaque)
		latencies = append(latencies, micros(began[q]))
		following := after(a.header, `"nextBeginOffset":`)
		atomic.AddInt64(pulls, 1)
		atomic.AddInt64(volume, int64(len(a.body)))
		if a.code == 0 {
			atomic.AddInt64(got, int64(records(a.body)))
		}
		if following > int64(offsets[q]) {
			atomic.AddInt64(scanned, following-int64(offsets[q]))
			offsets[q] = uint64(following)
			next = append(next, q)
		}
	}
}

func records(body []byte) int {
	n := 0
	for len(body) >= 4 {
		size := int(binary.BigEndian.Uint32(body))
		if size < 8 || size > len(body) {
			fail(fmt.Errorf("a record of %d bytes in %d left", size, len(body)))
		}
		body = body[size:]
		n++
	}
	return n
}

// tail sends at a fixed budget while long pulls follow every queue; the age is receipt minus the born time that was sent.
func tail(out result) {
	var ages []uint32
	var mutex sync.Mutex
	var received int64
	for q := 0; q < *queues; q++ {
		c := dial()
		go func(c net.Conn, q int) {
			reader := bufio.NewReaderSize(c, 1<<16)
			t := pullTemplate(*topic, q, *most, 15000)
			a, err := ask(c, 30, []field{{"topic", *topic}, {"queueId", fmt.Sprint(q)}}, nil)
			if err != nil {
				fail(err)
			}
			offset := uint64(after(a.header, `"offset":`))
			var buffer []byte
			for {
				if _, err := c.Write(t.appendTo(nil, uint32(q), 0, offset, 0)); err != nil {
					return
				}
				a, b, err := readAnswer(reader, buffer)
				if err != nil {
					return
				}
				buffer = b
				if following := after(a.header, `"nextBeginOffset":`); following >= 0 {
					offset = uint64(following)
				}
				now := time.Now().UnixMicro()
				mutex.Lock()
				for body := a.body; a.code == 0 && len(body) >= 48; body = body[binary.BigEndian.Uint32(body):] {
					ages = append(ages, uint32(now-int64(binary.BigEndian.Uint64(body[88:]))))
					atomic.AddInt64(&received, 1)
				}
				mutex.Unlock()
			}
		}(c, q)
	}
	time.Sleep(500 * time.Millisecond)
	sent := stampedSends()
	for end := time.Now().Add(5 * time.Second); atomic.LoadInt64(&received) < int64(sent) && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
	}
	mutex.Lock()
	defer mutex.Unlock()
	out["sent"], out["received"] = sent, received
	percentiles(out, "us_", ages)
}

// stampedSends sends at the budget with the time in microseconds as the first 8 bytes of each body.
func stampedSends() int {
	c := dial()
	go func() {
		reader := bufio.NewReaderSize(c, 1<<16)
		var buffer []byte
		for {
			_, b, err := readAnswer(reader, buffer)
			if err != nil {
				return
			}
			buffer = b
		}
	}()
	all := sendTemplates()
	gap := time.Duration(float64(time.Second) / *perSecond)
	total := int(*perSecond * *seconds)
	start := time.Now()
	var frame []byte
	for i := 0; i < total; i++ {
		time.Sleep(time.Until(start.Add(time.Duration(i) * gap)))
		frame = all[i%len(all)].appendTo(frame[:0], uint32(i), atomic.AddUint64(&uniq, 1), 0, uint64(time.Now().UnixMilli()))
		binary.BigEndian.PutUint64(frame[len(frame)-*bodyBytes:], uint64(time.Now().UnixMicro()))
		if _, err := c.Write(frame); err != nil {
			fail(err)
		}
	}
	return total
}

// idle opens connections, lets each say one heartbeat, and holds them.
func idle(out result) {
	for i := 0; i < *conns; i++ {
		c := dial()
		body := fmt.Sprintf(`{"clientID":"idle@%d","producerDataSet":[{"groupName":"idle"}],"consumerDataSet":[]}`, i)
		if a, err := ask(c, heartBeat, nil, []byte(body)); err != nil || a.code != 0 {
			fail(fmt.Errorf("heartbeat of connection %d: code %d, %v", i, a.code, err))
		}
	}
	fmt.Println(`{"open":` + fmt.Sprint(*conns) + `}`)
	time.Sleep(time.Duration(*seconds * float64(time.Second)))
	out["held"] = *conns
}

// first tries until one send is acknowledged, and says how long after its own start that was.
func first(out result) {
	start := time.Now()
	t := sendTemplate(*topic, 0, *bodyBytes, "")
	for time.Since(start).Seconds() < *seconds {
		c, err := net.DialTimeout("tcp", *addr, time.Second)
		if err == nil {
			if _, err = c.Write(t.appendTo(nil, 1, atomic.AddUint64(&uniq, 1), 0, uint64(time.Now().UnixMilli()))); err == nil {
				a, _, err := readAnswer(bufio.NewReader(c), nil)
				if err == nil && a.code == 0 {
					out["ms"] = float64(time.Since(start).Microseconds()) / 1000
					return
				}
			}
			c.Close()
		}
		time.Sleep(2 * time.Millisecond)
	}
	fail(fmt.Errorf("no send was acknowledged within %g s", *seconds))
}

func main() {
	flag.Parse()
	work := map[string]func(result){"create": create, "send": send, "rate": rate, "pull": pull, "pop": pop, "popmode": popMode, "tail": tail, "idle": idle, "first": first}[*command]
	if work == nil {
		fail(fmt.Errorf("command %q is unknown; see -help", *command))
	}
	out := result{"cmd": *command}
	work(out)
	line, err := json.Marshal(out)
	if err != nil {
		fail(err)
	}
	fmt.Println(string(line))
}
