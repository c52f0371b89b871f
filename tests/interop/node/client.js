'use strict';
// A program over the Node client.
//
//   client.js NAME_SERVER GROUP TOPIC COUNT FAILURES [EXPRESSION [broadcasting]]
//
// A JSON line a delivery, ends after COUNT accepted messages; the first FAILURES deliveries of each fail (-1: all of them,
// and a message is retried once). An error of the client is a line {"event": "error"}, a commit one {"event": "commit"}.
// EXPRESSION is tags, or SQL92:... A new group begins at the last offset, or where INTEROP_FROM says: first, last, or a
// time as 20060102150405 in the local time zone.
//
//   client.js send NAME_SERVER MESSAGES
//
// Sends messages given as a JSON list; a JSON line a result.

const httpclient = require('urllib');
const { Consumer, Message, Producer } = require('ali-ons');
const RemoteBrokerOffsetStore = require('ali-ons/lib/store/remote_broker');

const say = fields => process.stdout.write(JSON.stringify(fields) + '\n');
const PATIENCE_MS = 120000;
// INTEROP_ACCESS_KEY and INTEROP_SECRET_KEY sign all requests; the client demands a key where nobody asks for it, too.
const KEY = {
  accessKeyId: process.env.INTEROP_ACCESS_KEY || 'none',
  accessKeySecret: process.env.INTEROP_SECRET_KEY || 'none',
};

async function send(nameServer, messages) {
  const producer = new Producer({
    httpclient,
    nameSrv: nameServer,
    ...KEY,
    producerGroup: 'node_sender',
    sendMsgTimeout: PATIENCE_MS,
  });
  producer.on('error', error => say({ event: 'error', text: error.message }));
  await producer.ready();
  for (const given of JSON.parse(messages)) {
    const message = new Message(given.topic, given.tags || null, Buffer.from(given.body, 'base64'));
    Object.assign(message.properties, given.properties);
    if (given.keys) message.keys = [ given.keys ];
    if (given.delay_level) message.delayTimeLevel = given.delay_level;
    const sent = await producer.send(message);
    say({ status: sent.sendStatus, msg_id: sent.msgId, queue: sent.messageQueue.queueId, offset: sent.queueOffset });
  }
  process.exit(0);
}

async function consume(nameServer, group, topic, count, failures, expression = '*', how = '') {
  const accepted = new Set();

  // What the client commits it tells nobody else.
  const commit = RemoteBrokerOffsetStore.prototype.updateConsumeOffsetToBroker;
  RemoteBrokerOffsetStore.prototype.updateConsumeOffsetToBroker = async function(queue, offset) {
    await commit.call(this, queue, offset);
    say({ event: 'commit', topic: queue.topic, queue: queue.queueId, offset });
  };

  const from = process.env.INTEROP_FROM || 'last';
  const consumer = new Consumer({
    httpclient,
    nameSrv: nameServer,
    ...KEY,
    consumerGroup: group,
    persistConsumerOffsetInterval: 1000,
    rebalanceInterval: 1000,
    consumeFromWhere: `CONSUME_FROM_${{ first: 'FIRST_OFFSET', last: 'LAST_OFFSET' }[from] || 'TIMESTAMP'}`,
    consumeTimestamp: from,
    isBroadcast: how === 'broadcasting',
    maxReconsumeTimes: failures === '-1' ? 1 : 16,
  });
  consumer.on('error', error => say({ event: 'error', text: error.message }));
  const isSql = expression.startsWith('SQL92:');
  const selector = isSql ? { expressionType: 'SQL92', subString: expression.slice(6) } : expression;
  consumer.subscribe(topic, selector, async message => {
    say({
      topic: message.topic,
      queue: message.queueId,
      body: String(message.body),
      reconsume_times: message.reconsumeTimes,
      msg_id: message.msgId,
      stored_ms: message.storeTimestamp,
    });
    // ACTION_RETRY would do for the first delivery only: of a retry the client drops what the handler returns.
    if (failures === '-1' || message.reconsumeTimes < Number(failures)) throw new Error('fails as it was told');
    accepted.add(message.originMessageId || message.msgId);
    if (accepted.size === Number(count)) {
      await consumer.close();
      process.exit(0);
    }
  });
}

const words = process.argv.slice(2);
(words[0] === 'send' ? send(...words.slice(1)) : consume(...words)).catch(error => {
  console.error(error);
  process.exit(1);
});
