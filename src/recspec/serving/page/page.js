/* The page: its state, and what happens when something is chosen. */

const state = {models: [], columns: null, context: [], filters: [], basket: [], user: '', ranks: new Map(), began: false, running: null};
const model = () => state.models.find(each => each.name === at('model').value);
const beside = () => state.models.find(each => each.name === at('beside').value);

/* --- start, token --- */

function signIn(message) {
  kept.set('token', '');
  at('sign-out').hidden = true;
  for (const id of ['try', 'rows', 'model-note', 'live']) at(id).hidden = true;
  clearTimeout(live.timer);
  at('sign-in').hidden = false;
  at('problem').textContent = message;
  at('token').value = '';
  at('token').focus();
}

async function start() {
  const served = await call('/models');
  state.models = served.models;
  at('sign-in').hidden = true;
  at('sign-out').hidden = !kept.get('token');
  if (!state.models.length) throw new Error('No model is loaded.');
  const asked = new URLSearchParams(location.hash.slice(1));
  const option = each => make('option', {value: each.name}, each.kind === each.name ? each.name : each.name + ' (' + each.kind + ')');
  at('model').replaceChildren(...state.models.map(option));
  const can = each => each.recommends || each.in_context;
  at('model').value = (state.models.find(each => each.name === asked.get('model')) ?? state.models.find(can) ?? state.models[0]).name;
  at('model-box').hidden = state.models.length < 2;
  state.basket = asked.getAll('item').slice(0, 100).map(item => ({item, title: null}));
  state.user = asked.get('user') ?? '';
  watch(served.takes_events);
  await showModel(asked.get('beside'));
}

async function showModel(other = at('beside').value) {
  const now = model();
  state.began = false;
  shown.model = now.name;
  const can = each => each.recommends || each.in_context;
  const others = state.models.filter(each => each !== now && can(each) && can(now));
  at('beside').replaceChildren(make('option', {value: ''}, 'no other'), ...others.map(each => make('option', {value: each.name}, each.name)));
  at('beside').value = others.some(each => each.name === other) ? other : '';
  at('beside-box').hidden = !others.length;
  showReports();
  showStages(now);
  at('try').hidden = !can(now);
  at('rows').hidden = !now.raw;
  at('rows').open = !can(now);
  at('lists').replaceChildren();
  at('history').hidden = true;
  if (!now.raw) throw new Error('This model is an export: it takes features, and no raw values. Serve its run to try it here.');
  state.columns = await call('/columns' + query({model: now.name}));
  if (now !== model()) return;
  showRows(now, state.columns);
  if (!can(now)) return;
  showFields();
  const isTypical = !state.user && !state.basket.length;
  if (isTypical) {
    const user = await typicalUser(now);
    if (now !== model()) return;
    state.user = user;
  }
  at('user').value = state.user;
  at('user-note').hidden = !isTypical || !state.user;
  showBasket();
  state.began = true;
  await recommend();
}

const OWN = ['user', 'history', 'context'], TRIED = 5;

/* The user nearest to the median activity whom the model serves well: with a full list, of the user's own. */
async function typicalUser(now) {
  const {users} = await call('/users' + query({model: now.name, order: 'typical', limit: TRIED}));
  for (const {user} of users) {
    const asked = {...request(), model: now.name, user: String(user), explain: false, liked: 0, shown: false};
    const data = await call('/recommend', asked).catch(() => ({items: []}));
    if (data.items.length >= asked.k && OWN.includes(data.answered_by)) return String(user);
  }
  return String(users[0]?.user ?? '');
}

function showReports() {
  const found = [model(), beside()].filter(each => each?.report);
  at('reports').replaceChildren(...found.map(each => make('a', {href: each.report, target: '_blank', rel: 'noopener'},
    found.length > 1 ? 'Report of ' + each.name : 'Report of the run', make('span', {className: 'hidden'}, ' (opens a new tab)'))));
}

function showStages(now) {
  const stages = now.pipeline;
  at('model-note').hidden = !stages;
  if (stages) at('model-note').textContent = 'A pipeline: ' + stages.retrievers.join(' and ') + ' find ' + count(stages.candidates, 'candidate') + (stages.filter ? ' of items with ' + stages.filter : '') + ', and ' + now.kind + ' ranks them.';
}

/* --- controls --- */

function showFields() {
  const {context, for_sale: sold, event_types: acts} = state.columns;
  const items = state.columns.items.filter(each => !sold?.includes('`' + each.name + '`'));
  at('sold-note').textContent = sold ? 'Only items with ' + sold.replaceAll('`', '') + ' are shown.' : '';
  at('act-type').replaceChildren(...acts.map(each => make('option', {value: each}, label(each))));
  at('act').hidden = !acts.length;
  at('act-status').textContent = '';
  shown.image = items.find(each => each.kind === 'image')?.name ?? null;
  shown.columns = items.filter(each => each.kind !== 'image').slice(0, 12);
  state.context = context.map(column => ({column, ...valueField(column, {begin: column.is_required})}));
  const [needed, others] = [true, false].map(wanted => state.context.filter(each => each.column.is_required === wanted));
  at('context').hidden = !state.context.length;
  at('context-head').textContent = needed.length ? 'In which situation?' : 'What is known of the user?';
  at('context-fields').replaceChildren(...needed.map(each => each.element));
  at('about-fields').replaceChildren(...others.map(each => each.element));
  at('about-box').hidden = !others.length;
  state.filters = items.map(filterField).filter(each => each);
  at('filters').replaceChildren(...state.filters.map(each => each.element));
  const numbers = items.find(each => each.kind === 'number'), kinds = items.find(each => each.kind === 'choice');
  at('expression').placeholder = numbers ? named(numbers.name) + ' < ' + said(numbers.high) : kinds ? named(kinds.name) + ' == ' + quoted(kinds.values[0]) : '';
  const alike = items.filter(each => each.kind === 'choice' || each.kind === 'choices');
  at('diverse-by').replaceChildren(make('option', {value: ''}, 'what the model learned'), ...alike.map(each => make('option', {value: each.name}, label(each.name))));
}

function filterText() {
  const own = at('expression').value.trim(), sold = state.columns.for_sale;
  return [...(sold ? [sold] : []), ...state.filters.map(each => each.test()).filter(each => each), ...(own ? ['(' + own + ')'] : [])].join(' and ');
}

function showBasket() {
  at('basket').replaceChildren(...state.basket.map((each, place) => make('li', {},
    make('span', {dir: 'auto'}, plainTitle(each)),
    make('button', {type: 'button', 'aria-label': 'Remove ' + plainTitle(each) + ' from the basket', on: {click: () => removeFromBasket(place)}}, '×'))));
}

function addToBasket(item) {
  if (!state.basket.some(each => String(each.item) === String(item.item))) state.basket.push({item: item.item, title: item.title ?? null});
  showBasket();
  trying(recommend);
}

function removeFromBasket(place) {
  state.basket.splice(place, 1);
  showBasket();
  const left = at('basket').querySelectorAll('button');
  (left[Math.min(place, left.length - 1)] ?? at('basket-item')).focus();
  trying(recommend);
}

/* --- recommending --- */

function request() {
  const context = {};
  for (const each of state.context) {
    const value = each.value();
    if (value !== undefined) context[each.column.name] = value;
  }
  const diversity = Number(at('diversity').value), k = Math.min(100, Math.max(1, Math.round(Number(at('k').value)) || 10));
  return {
    user: state.user || undefined, items: state.basket.map(each => each.item), context, k,
    filter: filterText() || undefined, exclude_seen: !at('seen').checked, explain: at('explain').checked,
    diversity, diverse_by: diversity && at('diverse-by').value ? at('diverse-by').value : undefined, liked: 20,
  };
}

function remember() {
  const given = new URLSearchParams();
  if (state.models.length > 1) given.set('model', at('model').value);
  if (beside()) given.set('beside', at('beside').value);
  if (state.user) given.set('user', state.user);
  for (const each of state.basket) given.append('item', each.item);
  history.replaceState(null, '', location.pathname + location.search + '#' + given);
}

/* `before` holds the ranks of the list before an event; without it, no card says what changed. */
async function recommend({before = null} = {}) {
  state.running?.abort();
  state.before = before;
  at('results').removeAttribute('aria-busy');
  const {signal} = state.running = new AbortController(), asked = request(), text = filterText();
  remember();
  const active = state.filters.filter(each => each.test()).length + (at('expression').value.trim() ? 1 : 0);
  at('filter-count').hidden = !active;
  at('filter-count').textContent = String(active);
  at('filter-text').hidden = !text;
  at('filter-text').textContent = 'filter: ' + text;
  at('diverse-box').hidden = at('diversity-note').hidden = !asked.diversity;
  if (!asked.user && !asked.items.length && !Object.keys(asked.context).length) throw new Error('Pick a user, or put an item into the basket.');
  at('results').setAttribute('aria-busy', 'true');
  try {
    const sides = [model(), beside()].filter(each => each);
    const [title, ...answers] = await Promise.all([userTitle(asked.user, signal), ...sides.map(side => answered(side, asked, signal))]);
    state.title = title;
    if (signal.aborted) return false;
    for (const [place, each] of answers.entries()) if (each.error instanceof Unauthorized || (each.error && !place)) throw each.error;
    await showAnswers(answers, signal);
    return !signal.aborted;
  } finally {
    if (!signal.aborted) at('results').removeAttribute('aria-busy');
  }
}

async function userTitle(user, signal) {
  if (user === undefined) return null;
  const [first] = (await call('/users' + query({model: shown.model, query: user.slice(0, 200), limit: 1}), null, signal)).users;
  return first && String(first.user) === user ? first.title : null;
}

/* One model's answer; an error of the other model stands in its own list. */
async function answered(side, asked, signal) {
  const began = performance.now();
  try {
    const data = await call('/recommend', {...asked, model: side.name, shown: false}, signal);
    return {side, data, items: await withFields(data.items, signal), seconds: performance.now() - began};
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    return {side, error};
  }
}

const BY = {user: 'the user’s history', history: 'their new events', basket: 'the basket', context: 'the situation', basket_vectors: 'the basket', popularity: 'popularity'};

async function showAnswers(answers, signal) {
  const [{data, items}] = answers, liked = await forSale(data.liked, signal);
  if (signal.aborted) return;
  state.ranks = new Map(items.map(each => [each.item, each.rank]));
  at('history').hidden = !liked.length;
  at('history-head').textContent = 'This user’s items, the most popular first';
  at('history-items').replaceChildren(...liked.map(each => make('li', {},
    make('button', {type: 'button', 'aria-label': 'Items similar to ' + plainTitle(each), on: {click: () => showSimilar(each)}}, picture(each), make('span', {dir: 'auto'}, plainTitle(each))))));
  at('lists').className = answers.length > 1 ? 'two' : '';
  at('lists').replaceChildren(...answers.map((each, place) => list(each, answers[1 - place])));
  tellStatus(answers);
  tellPictures();
}

function tellStatus(answers) {
  const [{data, items}] = answers, parts = [];
  if (data.user !== null && data.user !== undefined) {
    parts.push(make('b', {dir: 'auto'}, 'User ' + data.user + (state.title ? ' · ' + state.title : '')), ' ');
    if (data.unknown_user) parts.push(make('span', {className: 'flag'}, 'unknown user'), ' ');
  }
  parts.push(count(items.length, 'item') + ', by ' + BY[data.answered_by]);
  if (answers.length > 1 && answers[1].items) {
    const theirs = new Set(answers[1].items.map(each => each.item)), both = items.filter(each => theirs.has(each.item)).length;
    parts.push('; ' + both + ' of them in both lists');
  }
  at('status').replaceChildren(...parts);
}

function tellPictures() {
  const others = [...hosts].sort(), on = picturesAllowed();
  at('pictures').hidden = !others.length;
  if (!others.length) return;
  const named = others.slice(0, 3).join(', ') + (others.length > 3 ? ' and others' : '');
  at('pictures-text').textContent = on ? 'Pictures come from ' + named + '.' : 'The catalogue has pictures at ' + named + '. If you show them, these hosts see what you look at.';
  at('pictures-button').textContent = on ? 'Hide pictures' : 'Show pictures';
}

function list({side, data, items, error, seconds}, other) {
  const name = other ? make('h2', {}, side.name) : make('h2', {}, 'Recommended');
  if (error) return make('section', {className: 'list'}, name, make('p', {className: 'empty'}, error.message));
  const ranks = new Map((other?.items ?? []).map(each => [each.item, each.rank]));
  const how = measured(items, data.answered_by);
  const before = side === model() ? state.before : null;
  const cards = items.map((each, place) => card(each, how?.[place], {
    signs: [...changed(each, before), ...(ranks.has(each.item) ? ['also number ' + ranks.get(each.item) + ' of ' + other.side.name] : [])],
    actions: itemActions(each),
  }));
  return make('section', {className: 'list', 'aria-label': other ? 'Items of ' + side.name : 'Recommended items'},
    make('div', {className: 'list-head'}, name, make('span', {className: 'note'}, milliseconds(data.milliseconds) + ' in the server, ' + milliseconds(seconds) + ' in all')),
    make('p', {className: 'note'}, meaning(items, data.answered_by)),
    data.notes.length ? make('ul', {className: 'notes'}, data.notes.map(each => make('li', {}, each))) : null,
    items.length ? make('ol', {className: 'items'}, cards) : make('p', {className: 'empty'}, 'No item is left. Loosen the filters.'));
}

/* --- events --- */

function pickUser(user) {
  if (user !== state.user) at('user-note').hidden = true;
  state.user = at('user').value = user;
}

const users = new Finder(at('user'), 'user', {model: () => at('model').value, picked: user => {
  pickUser(String(user));
  trying(recommend);
}});
const basketItems = new Finder(at('basket-item'), 'item', {model: () => at('model').value, picked: (item, title) => {
  at('basket-item').value = '';
  if (item !== '') addToBasket({item, title});
}});

at('ask').addEventListener('submit', event => {
  event.preventDefault();
  for (const each of [users, basketItems]) each.close();
  pickUser(at('user').value.trim());
  trying(recommend).then(() => { if (at('results').getBoundingClientRect().top > innerHeight / 2) at('results').scrollIntoView(); });
});
at('ask').addEventListener('change', event => {
  if (event.target === at('user') || event.target === at('basket-item')) return;
  clearTimeout(state.timer);
  if (state.began) state.timer = setTimeout(() => trying(recommend), 150);
});
at('user').addEventListener('change', () => pickUser(at('user').value.trim()));
at('clear-filters').addEventListener('click', () => {
  for (const each of state.filters) each.clear();
  at('expression').value = '';
  trying(recommend);
});
at('model').addEventListener('change', () => trying(() => showModel()));
at('beside').addEventListener('change', () => { showReports(); trying(recommend); });
at('similar-close').addEventListener('click', () => at('similar').close());
at('pictures-button').addEventListener('click', () => {
  const on = !picturesAllowed();
  kept.set('images', on ? 'on' : '');
  const search = on ? '?images=on' : ''; /* the policy that the server sends with this address */
  if (location.search === search) location.reload();
  else location.assign(location.pathname + search + location.hash);
});
at('sign-in').addEventListener('submit', event => {
  event.preventDefault();
  kept.set('token', at('token').value.trim());
  at('token').value = '';
  trying(start);
});
at('sign-out').addEventListener('click', () => signIn(''));
at('which').open = at('live').open = innerWidth > 600; /* on a phone the results come sooner */
trying(start);
