'use strict';
// A program over the Node client.
//
//   client.js NAME_SERVER GROUP TOPIC COUNT FAILURES [EXPRESSION]
//
// A JSON line a delivery, ends after COUNT accepted messages; the first FAILURES deliveries of each fail. An error of the
// client is a line {"event": "error"}, a commit one {"event": "commit"}. EXPRESSION is tags, or SQL92:...

const httpclient = require('urllib');
const { Consumer } = require('ali-ons');
const RemoteBrokerOffsetStore = require('ali-ons/lib/store/remote_broker');

const [nameServer, group, topic, count, failures, expression = '*'] = process.argv.slice(2);
const accepted = new Set();
const say = fields => process.stdout.write(JSON.stringify(fields) + '\n');

// What the client commits it tells nobody else.
const commit = RemoteBrokerOffsetStore.prototype.updateConsumeOffsetToBroker;
RemoteBrokerOffsetStore.prototype.updateConsumeOffsetToBroker = async function(queue, offset) {
  await commit.call(this, queue, offset);
  say({ event: 'commit', topic: queue.topic, queue: queue.queueId, offset });
};

const consumer = new Consumer({
  httpclient,
  nameSrv: nameServer,
  accessKeyId: 'none',
  accessKeySecret: 'none',
  consumerGroup: group,
  persistConsumerOffsetInterval: 1000,
  rebalanceInterval: 1000,
});
consumer.on('error', error => say({ event: 'error', text: error.message }));
const isSql = expression.startsWith('SQL92:');
const selector = isSql ? { expressionType: 'SQL92', subString: expression.slice(6) } : expression;
consumer.subscribe(topic, selector, async message => {
  say({
    topic: message.topic,
    body: String(message.body),
    reconsume_times: message.reconsumeTimes,
    msg_id: message.msgId,
    stored_ms: message.storeTimestamp,
  });
  // ACTION_RETRY would do for the first delivery only: of a retry the client drops what the handler returns.
  if (message.reconsumeTimes < Number(failures)) throw new Error('fails as it was told');
  accepted.add(message.originMessageId || message.msgId);
  if (accepted.size === Number(count)) {
    await consumer.close();
    process.exit(0);
  }
});
