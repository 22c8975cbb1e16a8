/* Elements, and requests to the server. Every text becomes a text node: nothing is ever read as markup. */

const at = id => document.getElementById(id);

/* An element with properties and children; a child that is no element becomes text, and null is left out. */
function make(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (name === 'on') for (const [event, work] of Object.entries(value)) made.addEventListener(event, work);
    else if (name.includes('-') || name === 'role' || name === 'for' || name === 'dir') made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.flat().filter(each => each !== undefined && each !== null && each !== ''));
  return made;
}

/* What this tab remembers; nothing where the browser forbids it. */
const kept = {
  memory: {},
  get(name) {
    try { return sessionStorage.getItem('recspec.' + name) ?? ''; } catch { return this.memory[name] ?? ''; }
  },
  set(name, value) {
    this.memory[name] = value;
    try {
      if (value) sessionStorage.setItem('recspec.' + name, value);
      else sessionStorage.removeItem('recspec.' + name);
    } catch { /* the memory holds it */ }
  },
};

class Unauthorized extends Error {}

async function call(path, body, signal) {
  const headers = {}, token = kept.get('token');
  if (token) headers.authorization = 'Bearer ' + token;
  if (body) headers['content-type'] = 'application/json';
  const given = {method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal};
  let answer;
  try {
    answer = await fetch(path, given);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error('The server does not answer. Is it still running?');
  }
  const isText = answer.headers.get('content-type')?.startsWith('text/plain');
  const data = await (isText ? answer.text() : answer.json()).catch(() => ({error: 'no answer in JSON (status ' + answer.status + ')'}));
  if (answer.status === 401) throw new Unauthorized(token ? 'The server does not know this token.' : '');
  if (!answer.ok) throw new Error(data.error || 'status ' + answer.status);
  return data;
}

const query = given => '?' + new URLSearchParams(given);

/* Do a work and show why it failed; a work that a later one replaced is silent. */
async function trying(work) {
  at('problem').textContent = '';
  try {
    await work();
  } catch (error) {
    if (error.name === 'AbortError') return;
    if (error instanceof Unauthorized) signIn(error.message);
    else at('problem').textContent = error.message;
  }
}

/* --- numbers as people read them --- */

const digits = (number, most) => number.toLocaleString('en', {maximumSignificantDigits: most});
const milliseconds = number => digits(number, number < 100 ? 2 : 3) + ' ms';
const count = (number, one) => number.toLocaleString('en') + ' ' + one + (number === 1 ? '' : 's');

function percent(share) {
  if (share > 0 && share < 0.0001) return 'under 0.01 %';
  if (share < 1 && share > 0.9999) return 'over 99.99 %';
  return digits(100 * share, share > 0.99 ? 4 : share < 0.1 ? 2 : 3) + ' %';
}

/* The time since a moment, given in seconds since 1970: 5 s, 12 min, 3 h, 2 days. */
function age(moment) {
  const seconds = Math.max(0, Date.now() / 1000 - moment);
  const [size, unit] = [[86400, 'day'], [3600, ' h'], [60, ' min'], [1, ' s']].find(([each]) => seconds >= 2 * each) ?? [1, ' s'];
  const many = Math.floor(seconds / size);
  return (unit === 'day' ? count(many, unit) : many + unit) + ' ago';
}

function said(value) {
  if (Array.isArray(value)) return value.map(said).join(', ');
  if (value === true) return 'yes';
  if (value === false) return 'no';
  if (typeof value === 'number') return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(7)));
  return String(value).replace(/T00:00:00(\.0+)?$/, '');
}

/* A column's name as a label: `in_stock` is "In stock". */
function label(name) {
  const plain = name.replace(/[_\s]+/g, ' ').trim() || name;
  return plain[0].toUpperCase() + plain.slice(1);
}
