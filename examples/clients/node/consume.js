'use strict';
// Prints the bodies of COUNT messages: node consume.js NAME_SERVER TOPIC COUNT.

const httpclient = require('urllib');
const { Consumer } = require('ali-ons');

const [nameServer, topic, count] = process.argv.slice(2);
let left = Number(count);
const consumer = new Consumer({
  httpclient,
  nameSrv: nameServer,
  // The client was made for a cloud and wants keys; a broker without access rules ignores them.
  accessKeyId: 'none',
  accessKeySecret: 'none',
  consumerGroup: 'node-example',
});
consumer.on('error', error => console.error(error.message));
consumer.subscribe(topic, '*', async message => {
  console.log(`received: ${message.body}`);
  left -= 1;
  if (left === 0) {
    await consumer.close();
    process.exit(0);
  }
});
