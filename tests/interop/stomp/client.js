'use strict';
// @stomp/stompjs over WebSocket, steered by lines of JSON: a command a line in, an answer or an event a line out. Ends with
// its input. The commands are those of `SteeredClient` in tests/interop/stomp_clients.py.

global.WebSocket = require('ws').WebSocket; // which browsers have
const { Client, Versions } = require('@stomp/stompjs');
const { readFileSync } = require('fs');
const readline = require('readline');

const say = fields => process.stdout.write(JSON.stringify(fields) + '\n');
const PATIENCE = 1000; // times an interval without heart-beats
const RECONNECT_MS = 50;
const clients = new Map();
let receipts = 0;

// Return the receipt header for one frame, and what waits for that receipt or for an error.
function receipt(entry) {
  const id = `receipt-${++receipts}`;
  const came = new Promise((resolve, reject) => {
    entry.client.watchForReceipt(id, () => resolve({}));
    entry.refused = reject;
  });
  return [{ receipt: id }, came];
}

function connect({ client: name, url, version, ca, heart_beat: [ outgoing, incoming ], headers }) {
  const versions = new Versions([ version ]);
  const trusted = ca ? { ca: readFileSync(ca) } : {};
  const entry = { messages: [], transactions: new Map(), refused: () => {} };
  clients.set(name, entry);
  return new Promise((resolve, reject) => {
    entry.client = new Client({
      stompVersions: versions,
      webSocketFactory: () => new WebSocket(url, versions.protocolVersions(), trusted),
      connectHeaders: headers,
      reconnectDelay: RECONNECT_MS,
      heartbeatOutgoing: outgoing,
      heartbeatIncoming: incoming,
      heartbeatToleranceMultiplier: PATIENCE,
      debug: text => text === '<<< PONG' && say({ event: 'beat', client: name }),
      onConnect: frame => {
        say({ event: 'connected', client: name });
        resolve({ version: frame.headers.version });
      },
      onStompError: frame => {
        const error = new Error(`${frame.headers.message} ${frame.body}`);
        say({ event: 'error', client: name, text: error.message, receipt: frame.headers['receipt-id'] || '' });
        entry.refused(error);
        reject(error);
      },
    });
    entry.client.activate();
  });
}

const commands = {
  connect,
  async subscribe({ client: name, destination, number, ack, headers }) {
    const entry = clients.get(name);
    const [ header, came ] = receipt(entry);
    entry.client.subscribe(destination, message => {
      entry.messages.push(message);
      const body = Buffer.from(message.binaryBody).toString('base64');
      say({ event: 'message', client: name, number: entry.messages.length - 1, headers: message.headers, body });
    }, { ...headers, ...header, id: number, ack });
    return came;
  },
  async unsubscribe({ client: name, number, headers }) {
    const entry = clients.get(name);
    const [ header, came ] = receipt(entry);
    entry.client.unsubscribe(number, { ...headers, ...header });
    return came;
  },
  async send({ client: name, destination, body, is_text: isText, transaction, headers }) {
    const entry = clients.get(name);
    const [ header, came ] = transaction ? [{ transaction }, {}] : receipt(entry);
    const raw = Buffer.from(body, 'base64');
    const content = isText ? { body: raw.toString() } : { binaryBody: new Uint8Array(raw) };
    entry.client.publish({ destination, ...content, headers: { ...headers, ...header } });
    return came;
  },
  async settle({ client: name, how, number, transaction }) {
    const entry = clients.get(name);
    const [ header, came ] = transaction ? [{ transaction }, {}] : receipt(entry);
    entry.messages[number][how](header);
    return came;
  },
  async begin({ client: name, transaction }) {
    const entry = clients.get(name);
    entry.transactions.set(transaction, entry.client.begin(transaction));
    return {};
  },
  async end({ client: name, how, transaction }) {
    clients.get(name).transactions.get(transaction)[how]();
    return {};
  },
  async disconnect({ client: name }) {
    await clients.get(name).client.deactivate(); // DISCONNECT, and its receipt
    return {};
  },
  async forget({ client: name }) {
    await clients.get(name).client.deactivate({ force: true });
    return {};
  },
  async drop({ client: name }) {
    clients.get(name).client.webSocket.terminate();
    return {};
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
