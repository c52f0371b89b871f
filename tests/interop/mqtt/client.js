'use strict';
// MQTT.js, steered by lines of JSON: a command a line in, an answer or a message a line out. Ends with its input.
// The commands are those of `Steered` in tests/interop/mqtt_clients.py.

const fs = require('fs');
const mqtt = require('mqtt');
const readline = require('readline');

const say = fields => process.stdout.write(JSON.stringify(fields) + '\n');
const PATIENCE_MS = 180000;
const clients = new Map();

// Leave out what is not there.
const given = fields => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null && value !== undefined));

function toProperties(message) {
  const user = {};
  for (const [key, value] of message.user) user[key] = key in user ? [].concat(user[key], value) : value;
  return given({
    payloadFormatIndicator: message.is_text || undefined,
    messageExpiryInterval: message.expiry_s,
    contentType: message.content_type,
    responseTopic: message.response_topic,
    correlationData: message.correlation === null ? undefined : Buffer.from(message.correlation, 'base64'),
    userProperties: message.user.length ? user : undefined,
  });
}

function fromPacket(packet) {
  const found = packet.properties || {};
  const user = Object.entries(found.userProperties || {}).flatMap(([key, value]) => [].concat(value).map(each => [key, each]));
  return {
    topic: packet.topic,
    payload: Buffer.from(packet.payload).toString('base64'),
    qos: packet.qos,
    retain: packet.retain,
    user,
    content_type: found.contentType ?? null,
    response_topic: found.responseTopic ?? null,
    correlation: found.correlationData ? found.correlationData.toString('base64') : null,
    expiry_s: found.messageExpiryInterval ?? null,
    is_text: Boolean(found.payloadFormatIndicator),
  };
}

function connect({ client: name, url, client_id: clientId, version, clean, expiry_s: expiry, will, ca, user, password }) {
  const client = mqtt.connect(url, given({
    clientId,
    username: user,
    password,
    protocolVersion: version,
    clean,
    keepalive: 600,
    reconnectPeriod: 0,
    connectTimeout: PATIENCE_MS,
    ca: ca ? fs.readFileSync(ca) : undefined,
    properties: version === 5 ? { sessionExpiryInterval: expiry } : undefined,
    will: will ? {
      topic: will.topic,
      payload: Buffer.from(will.payload, 'base64'),
      qos: will.qos,
      retain: will.retain,
      properties: version === 5 ? toProperties(will) : undefined,
    } : undefined,
  }));
  clients.set(name, client);
  client.on('disconnect', packet => { client.reasonCode = packet.reasonCode; });
  client.on('message', (topic, payload, packet) => say({ event: 'message', client: name, message: fromPacket(packet) }));
  return new Promise((resolve, reject) => {
    client.once('connect', packet => resolve({ session_present: packet.sessionPresent }));
    client.on('error', reject);
    client.once('close', () => reject(new Error('closed before CONNACK')));
  });
}

const commands = {
  connect,
  async subscribe({ client, filter, qos }) {
    const [ granted ] = await clients.get(client).subscribeAsync(filter, { qos });
    return { granted: granted.qos };
  },
  async publish({ client: name, message }) {
    const client = clients.get(name);
    const properties = client.options.protocolVersion === 5 ? toProperties(message) : undefined;
    const options = given({ qos: message.qos, retain: message.retain, properties });
    await client.publishAsync(message.topic, Buffer.from(message.payload, 'base64'), options);
    return {};
  },
  async disconnect({ client }) {
    await clients.get(client).endAsync();
    return {};
  },
  // Wait until the broker has ended the connection, and return the reason code of its DISCONNECT, if there was one.
  ended({ client: name }) {
    const client = clients.get(name);
    return new Promise(resolve => {
      const answer = () => resolve({ reason: client.reasonCode ?? null });
      client.connected ? client.once('close', answer) : answer();
    });
  },
  drop({ client }) {
    return new Promise(resolve => {
      clients.get(client).once('close', () => resolve({}));
      clients.get(client).stream.destroy();
    });
  },
};

async function answer(command) {
  try {
    say({ id: command.id, result: await commands[command.do](command) });
  } catch (error) {
    say({ id: command.id, error: String(error.stack || error) });
  }
}

const lines = readline.createInterface({ input: process.stdin });
lines.on('line', line => answer(JSON.parse(line)));
lines.on('close', () => process.exit(0));
