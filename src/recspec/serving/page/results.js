/* Items as cards: rank, picture, fields, score, and why they are there. */

/* --- pictures --- */

const PICTURE = /^data:image\/(png|jpe?g|gif|webp|avif);base64,/i;
const hosts = new Set();
const picturesAllowed = () => new URLSearchParams(location.search).get('images') === 'on' && kept.get('images') === 'on';

/* The address of a picture that may be loaded now; '' for none. Pictures of other hosts wait until the user allows them. */
function pictureAddress(value) {
  if (typeof value !== 'string') return '';
  if (PICTURE.test(value)) return value;
  let address;
  try { address = new URL(value); } catch { return ''; }
  if (address.protocol !== 'https:' && address.protocol !== 'http:') return '';
  hosts.add(address.host);
  return picturesAllowed() ? address.href : '';
}

function picture(item) {
  if (!shown.image) return null;
  const box = make('div', {className: 'picture', 'aria-hidden': 'true'}), address = pictureAddress(item.fields[shown.image]);
  const initial = () => box.replaceChildren(String(item.title ?? item.item).trim().slice(0, 1).toUpperCase());
  initial();
  if (address) {
    const image = make('img', {alt: '', loading: 'lazy', decoding: 'async', referrerPolicy: 'no-referrer', on: {error: initial}});
    image.src = address;
    box.replaceChildren(image);
  }
  return box;
}

/* --- what the catalogue says --- */

const shown = {image: null, columns: [], model: ''};
const AT_ONCE = 200;

/* Items with their fields, in order; an item keeps its own title where the catalogue has none. Of the events that
   explain an item, those of items that may not be sold are left out. */
async function withFields(items, signal) {
  const ids = [...new Set(items.flatMap(each => [each, ...(each.because?.events ?? [])]).map(each => each.item))], found = new Map();
  for (let start = 0; start < ids.length; start += AT_ONCE) {
    const part = (await call('/catalogue', {model: shown.model, items: ids.slice(start, start + AT_ONCE)}, signal)).items;
    part.forEach((each, place) => found.set(ids[start + place], each));
  }
  const isSold = each => found.get(each.item)?.is_for_sale ?? false;
  return items.map(each => ({
    ...each, fields: found.get(each.item)?.fields ?? {}, title: each.title ?? found.get(each.item)?.title, isSold: isSold(each),
    because: each.because && {...each.because, events: each.because.kind === 'features' ? each.because.events : each.because.events.filter(isSold)},
  }));
}

/* The items that may be sold now, with their fields. */
async function forSale(items, signal) {
  return (await withFields(items, signal)).filter(each => each.isSold);
}

function values(item) {
  const given = shown.columns.filter(column => {
    const value = item.fields[column.name];
    return value !== null && value !== undefined && value !== '' && !(Array.isArray(value) && !value.length);
  });
  if (!given.length) return null;
  return make('dl', {className: 'values'}, given.map(column => make('div', {},
    make('dt', {}, label(column.name)), make('dd', {dir: 'auto'}, said(item.fields[column.name])))));
}

/* --- scores --- */

const track = share => {
  const bar = make('i');
  bar.style.width = Math.max(2, Math.min(100, 100 * share)).toFixed(1) + '%';
  return make('div', {className: 'track', 'aria-hidden': 'true'}, bar);
};

/* For each item words on its score, with a share for a bar where it is a probability; null where only the order counts. */
function measured(items, answeredBy) {
  if (items.length && items.every(each => each.probability !== undefined)) {
    const most = Math.max(...items.map(each => each.probability));
    return items.map(each => ({share: each.probability / most, words: percent(each.probability), more: 'likely'}));
  }
  if (answeredBy === 'popularity') return items.map(each => ({words: count(each.score, 'user')}));
  if (answeredBy === 'basket_vectors' || answeredBy === 'vectors') return items.map(each => ({share: each.score, words: digits(each.score, 2), more: 'alike'}));
  return null;
}

const EXPLAINED = {popularity: 'Ordered by the number of users.', basket_vectors: 'Ordered by likeness to the basket.'};
function meaning(items, answeredBy) {
  if (!items.length) return '';
  if (items.every(each => each.probability !== undefined)) return 'The percentage is the model’s probability; a bar compares it with the largest.';
  return EXPLAINED[answeredBy] ?? 'In the order of the model’s scores, which are no probabilities.';
}

function score({share, words, more}) {
  return make('div', {className: 'score'}, share === undefined ? null : track(share), make('span', {}, make('b', {}, words), more ? ' ' + more : ''));
}

/* --- why --- */

function why(because) {
  if (!because || !because.events.length) return null;
  const most = Math.max(...because.events.map(each => each.value));
  const exact = because.kind === 'shares';
  return make('details', {className: 'why'}, make('summary', {}, 'Why is it here?'),
    make('p', {className: 'note'}, exact ? 'These items of the history raised its score most. The bars are their exact parts of the score.' : 'These items of the history are the most like it. The model may have read others too.'),
    make('ul', {}, because.events.map(each => make('li', {}, track(exact ? each.value / most : each.value),
      make('span', {dir: 'auto'}, String(each.title ?? each.item), exact ? null : make('small', {className: 'note'}, '  ' + digits(each.value, 2) + ' alike'))))));
}

/* --- cards --- */

const plainTitle = item => String(item.title ?? item.item);

function card(item, how, {signs = [], actions = []}) {
  const titled = item.title !== null && item.title !== undefined;
  const head = make('h3', {dir: 'auto'}, plainTitle(item), titled ? make('small', {}, String(item.item)) : null);
  const told = [...signs];
  if (item.retrieved_by?.length) told.push('found by ' + item.retrieved_by.join(', '));
  if (item.boost) told.push('boosted');
  return make('li', {className: 'item'},
    make('span', {className: 'rank', 'aria-label': 'Rank ' + item.rank}, String(item.rank)), picture(item),
    make('div', {className: 'body'}, head, values(item), how && score(how),
      told.length ? make('div', {className: 'signs'}, told.map(each => make('span', {className: 'sign'}, each))) : null,
      make('div', {className: 'foot'}, actions.map(([name, work]) => make('button', {type: 'button', 'aria-label': name + ': ' + plainTitle(item), on: {click: work}}, name)), why(item.because))));
}

/* --- similar items, in a dialog --- */

async function showSimilar(item) {
  const box = at('similar');
  at('similar-head').textContent = 'Like ' + plainTitle(item);
  at('similar-status').textContent = 'Looking …';
  at('similar-items').replaceChildren();
  if (!box.open) box.showModal();
  at('similar-head').focus();
  try {
    const data = await call('/similar', {model: shown.model, item: item.item, k: 10, filter: filterText() || undefined});
    const items = await withFields(data.items);
    const how = measured(items, data.by);
    at('similar-items').replaceChildren(...items.map((each, place) => card(each, how?.[place], {actions: itemActions(each)})));
    at('similar-status').textContent = [count(items.length, 'item') + (data.by === 'vectors' ? ', by what the model learned of them' : ', by what goes with it'), ...data.notes].join('. ') + '.';
  } catch (error) {
    at('similar-status').textContent = error.message;
  }
  box.scrollTop = 0;
}

function itemActions(item) {
  const closing = work => () => { if (at('similar').open) at('similar').close(); work(); };
  const acts = canAct() ? [['Send event', closing(() => trying(() => act(item)))]] : [];
  return [...acts, ['Similar items', () => showSimilar(item)], ['Add to basket', closing(() => addToBasket(item))]];
}
