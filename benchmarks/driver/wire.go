package main

// The frames that the driver speaks: encoded once as templates, patched a message.

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
)

const (
	pullMessage    = 11
	setRequestMode = 401
	popMessage     = 200050
	ackMessage     = 200051
	heartBeat      = 34
	createTopic    = 17
	sendMessageV2  = 310
	pullSuspend    = 0x2
	pullSubscribed = 0x4
)

// Digits in templates that are overwritten in place.
const (
	opaqueDigits = 10
	offsetDigits = 19
	keyDigits    = 32
	bornDigits   = 13
)

type field struct{ name, value string }

func number(digits int, value uint64) string { return fmt.Sprintf("%0*d", digits, value) }

// encodeFrame returns a whole request frame with a JSON header.
func encodeFrame(code int, opaque string, fields []field, body []byte) []byte {
	var header bytes.Buffer
	header.WriteString(`{"code":` + strconv.Itoa(code) + `,"language":"GO","version":479,"flag":0,"opaque":` + opaque)
	header.WriteString(`,"serializeTypeCurrentRPC":"JSON","extFields":{`)
	for i, f := range fields {
		if i > 0 {
			header.WriteByte(',')
		}
		value := strings.NewReplacer("\x01", `\u0001`, "\x02", `\u0002`).Replace(f.value)
		header.WriteString(`"` + f.name + `":"` + value + `"`)
	}
	header.WriteString("}}")
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+header.Len()+len(body)))
	frame = binary.BigEndian.AppendUint32(frame, uint32(header.Len()))
	frame = append(frame, header.Bytes()...)
	return append(frame, body...)
}

// template is a frame with places that are patched for each request. Leading zeros are not JSON, so an
// opaque starts at 1e9 and is patched below that digit.
type template struct {
	frame                     []byte
	opaqueAt, keyAt, offsetAt int
	bornAt                    int
	opaqueBase                uint64
}

const opaqueBase = 1_000_000_000

func newTemplate(code int, fields []field, body []byte) *template {
	mark := strconv.Itoa(opaqueBase)
	t := &template{frame: encodeFrame(code, mark, fields, body), opaqueBase: opaqueBase}
	t.opaqueAt = bytes.Index(t.frame, []byte(`"opaque":`+mark)) + len(`"opaque":`)
	t.keyAt = bytes.Index(t.frame, []byte(strings.Repeat("K", keyDigits)))
	t.offsetAt = bytes.Index(t.frame, []byte(strings.Repeat("7", offsetDigits)))
	t.bornAt = bytes.Index(t.frame, []byte(strings.Repeat("8", bornDigits)))
	return t
}

func patch(at []byte, digits int, value uint64) {
	for i := digits - 1; i >= 0; i-- {
		at[i] = byte('0' + value%10)
		value /= 10
	}
}

func (t *template) appendTo(out []byte, opaque uint32, key, offset, born uint64) []byte {
	start := len(out)
	out = append(out, t.frame...)
	patch(out[start+t.opaqueAt:], opaqueDigits, t.opaqueBase+uint64(opaque))
	if t.keyAt > 0 {
		patch(out[start+t.keyAt:], keyDigits, key)
	}
	if t.bornAt > 0 {
		patch(out[start+t.bornAt:], bornDigits, born)
	}
	if t.offsetAt > 0 {
		out = t.putOffset(out, start, offset)
	}
	return out
}

// putOffset writes an offset as clients do, without leading zeros, and shortens the frame at start by what that saves.
func (t *template) putOffset(out []byte, start int, offset uint64) []byte {
	at := start + t.offsetAt
	out = strconv.AppendUint(out[:at], offset, 10)
	saved := uint32(at + offsetDigits - len(out))
	out = append(out, t.frame[t.offsetAt+offsetDigits:]...)
	for _, length := range [][]byte{out[start:], out[start+4:]} {
		binary.BigEndian.PutUint32(length, binary.BigEndian.Uint32(length)-saved)
	}
	return out
}

func sendTemplate(topic string, queue, bodyBytes int, more string) *template {
	properties := "UNIQ_KEY\x01" + strings.Repeat("K", keyDigits) + "\x02WAIT\x01true\x02TAGS\x01TagA" + more
	fields := []field{{"a", "bench"}, {"b", topic}, {"c", "TBW102"}, {"d", "16"}, {"e", strconv.Itoa(queue)}, {"f", "0"},
		{"g", strings.Repeat("8", bornDigits)}, {"h", "0"}, {"i", properties}, {"j", "0"}, {"k", "false"}, {"m", "false"}}
	return newTemplate(sendMessageV2, fields, bytes.Repeat([]byte("m"), bodyBytes))
}

func pullTemplate(topic string, queue, most, suspendMs int) *template {
	kind, expression := "TAG", *tags
	if *sql != "" {
		kind, expression = "SQL92", *sql
	}
	flags := pullSubscribed
	if suspendMs > 0 {
		flags |= pullSuspend
	}
	fields := []field{{"consumerGroup", "bench"}, {"topic", topic}, {"queueId", strconv.Itoa(queue)},
		{"queueOffset", strings.Repeat("7", offsetDigits)}, {"maxMsgNums", strconv.Itoa(most)}, {"sysFlag", strconv.Itoa(flags)},
		{"commitOffset", "0"}, {"suspendTimeoutMillis", strconv.Itoa(suspendMs)}, {"subscription", expression}, {"subVersion", "0"},
		{"expressionType", kind}}
	return newTemplate(pullMessage, fields, nil)
}

// answer is what the driver looks at of a response; body is valid until the next read.
type answer struct {
	code   int
	opaque uint32
	header []byte
	body   []byte
}

var errShort = errors.New("frame is shorter than its header says")

func after(header []byte, mark string) int64 {
	at := bytes.Index(header, []byte(mark))
	if at < 0 {
		return -1
	}
	at += len(mark)
	for at < len(header) && (header[at] == '"' || header[at] == ' ') {
		at++
	}
	value, seen, negative := int64(0), false, false
	if at < len(header) && header[at] == '-' {
		negative = true
		at++
	}
	for ; at < len(header) && header[at] >= '0' && header[at] <= '9'; at++ {
		value, seen = value*10+int64(header[at]-'0'), true
	}
	if !seen {
		return -1
	}
	if negative {
		return -value
	}
	return value
}

func readAnswer(r *bufio.Reader, buffer []byte) (answer, []byte, error) {
	var sizes [8]byte
	if _, err := io.ReadFull(r, sizes[:]); err != nil {
		return answer{}, buffer, err
	}
	rest := int(binary.BigEndian.Uint32(sizes[:4])) - 4
	headerBytes := int(binary.BigEndian.Uint32(sizes[4:]) & 0xffffff)
	if rest < headerBytes {
		return answer{}, buffer, errShort
	}
	if cap(buffer) < rest {
		buffer = make([]byte, rest)
	}
	buffer = buffer[:rest]
	if _, err := io.ReadFull(r, buffer); err != nil {
		return answer{}, buffer, err
	}
	header := buffer[:headerBytes]
	opaque := after(header, `"opaque":`)
	if opaque >= opaqueBase {
		opaque -= opaqueBase
	}
	return answer{int(after(header, `"code":`)), uint32(opaque), header, buffer[headerBytes:]}, buffer, nil
}

// ask sends one request and returns its answer.
func ask(c net.Conn, code int, fields []field, body []byte) (answer, error) {
	if _, err := c.Write(encodeFrame(code, "1", fields, body)); err != nil {
		return answer{}, err
	}
	a, _, err := readAnswer(bufio.NewReader(c), nil)
	return a, err
}
