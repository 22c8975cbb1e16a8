/* What happens now: the model's version, events, shown lists and experiments; and events that this page sends. */

const EVERY = 5, MINUTE = 60, VERDICTS_EVERY = 60; /* seconds */
const live = {timer: 0, takesEvents: false, samples: [], verdicts: new Map(), judged: 0};

/* Look now and then, as long as the page can be seen. */
function watch(takesEvents) {
  Object.assign(live, {takesEvents, samples: [], verdicts: new Map(), judged: 0});
  at('live').hidden = !takesEvents;
  clearTimeout(live.timer);
  look();
}

async function look() {
  clearTimeout(live.timer);
  try {
    if (document.visibilityState === 'visible') {
      if (live.takesEvents) await showLive();
      await followModel();
    }
  } catch (error) {
    if (error instanceof Unauthorized) return; /* the next request of the visitor asks for the token */
    at('live-short').textContent = error.message;
  }
  live.timer = setTimeout(look, 1000 * EVERY);
}

/* The list is made again when another version or catalogue answers. */
async function followModel() {
  const told = each => each && [each.version, each.update, each.digest, each.catalogue].join();
  const before = model(), {models} = await call('/models'), now = models.find(each => each.name === before?.name);
  if (!now || !state.began || before !== model() || told(now) === told(before)) return;
  state.models = state.models.map(each => models.find(one => one.name === each.name) ?? each);
  await trying(recommend);
}

/* --- figures of the server's metrics ------------------------------------------------------------------------------ */

/* Each metric's sum over its labels, and for each outcome or way of answering as `name/value`. */
function summed(text) {
  const found = {};
  for (const line of text.split('\n')) {
    const [, name, labels, value] = /^recspec_(\w+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (name === undefined) continue;
    const of = /(?:outcome|answered_by)="([^"]*)"/.exec(labels ?? '')?.[1];
    for (const key of of ? [name, name + '/' + of] : [name]) found[key] = (found[key] ?? 0) + Number(value);
  }
  return key => found[key] ?? 0;
}

async function showLive() {
  const moment = Date.now() / 1000, of = summed(await call('/metrics'));
  live.samples.push({at: moment, of});
  while (live.samples.length > 2 && live.samples[1].at <= moment - MINUTE) live.samples.shift();
  const [first] = live.samples, seconds = Math.round(moment - first.at), recent = seconds >= EVERY / 2;
  const since = key => recent ? of(key) - first.of(key) : of(key), outcome = name => since('events_total/' + name);
  const during = !recent ? 'since the start' : seconds >= MINUTE - EVERY ? 'in the last minute' : 'in the last ' + seconds + ' s';
  const newest = of('newest_event_timestamp_seconds'), now = model(), lost = since('exposures_total/lost');
  const fallbacks = since('recommendations_total/popularity') + since('recommendations_total/basket_vectors');
  const heard = newest ? age(newest) : 'none yet', made = now ? Date.parse(now.made_at) / 1000 : 0;
  const tiles = [
    ['Events ' + during, digits(outcome('accepted'), 9) + ' accepted', outcome('duplicate') + ' duplicate, ' + outcome('refused') + ' refused'],
    ['Newest event', heard, newest ? 'received ' + new Date(1000 * newest).toLocaleTimeString() : ''],
    now && ['Model ' + now.name, now.update ? 'update ' + now.update : 'as trained', 'made ' + age(made) + ', digest ' + now.digest.slice(0, 8) + (now.catalogue ? ', catalogue ' + now.catalogue : '')],
    ['Lists shown ' + during, digits(since('exposures_total/logged'), 9), lost ? lost + ' lost' : 'in the journal'],
    ['Unknown users ' + during, digits(since('unknown_users_total'), 9), fallbacks + ' fallbacks, ' + since('short_lists_total') + ' short, ' + since('empty_lists_total') + ' empty'],
  ];
  at('live-tiles').replaceChildren(...tiles.filter(each => each).map(([name, value, more]) => make('div', {},
    make('dt', {}, name), make('dd', {}, make('b', {}, value), more ? make('small', {}, more) : null))));
  at('live-short').textContent = 'newest event ' + heard;
  if (moment - live.judged >= VERDICTS_EVERY) await showExperiments(moment);
}

async function showExperiments(now) {
  const {experiments} = await call('/experiments');
  live.judged = now;
  at('experiments').hidden = !experiments.length;
  for (const {name} of experiments) {
    const told = await call('/experiments/' + encodeURIComponent(name)).then(each => each.verdict, error => error.message);
    live.verdicts.set(name, told);
  }
  const arm = each => make('li', {}, make('b', {dir: 'auto'}, each.name), ' ' + percent(each.share) + (each.users === null ? '' : ', ' + count(each.users, 'user')));
  at('experiments').querySelector('tbody').replaceChildren(...experiments.map(each => make('tr', {},
    make('th', {scope: 'row', dir: 'auto'}, each.name, make('small', {}, each.state)),
    make('td', {}, make('ul', {}, each.interleave ? make('li', {}, each.variants.map(one => one.name).join(' and ') + ' interleaved') : each.variants.map(arm))),
    make('td', {}, live.verdicts.get(each.name)))));
}

/* --- events that the page sends ----------------------------------------------------------------------------------- */

const canAct = () => !at('act').hidden && state.user !== '';
let actItem = null; /* what was picked last */

const actItems = new Finder(at('act-item'), 'item', {model: () => at('model').value, picked: (item, title) => {
  if (title === null && actItem && item === plainTitle(actItem)) { at('act').requestSubmit(); return; } /* Enter, once more */
  actItem = {item, title};
  at('act-item').value = plainTitle(actItem);
}});

at('act').addEventListener('submit', event => {
  event.preventDefault();
  actItems.close();
  const typed = at('act-item').value.trim(), item = actItem && plainTitle(actItem) === typed ? actItem : {item: typed, title: null};
  trying(async () => {
    if (!typed) throw new Error('Name the item of the event first.');
    await act(item);
  });
});

async function act(item) {
  const type = at('act-type').value, before = state.ranks;
  at('act-status').textContent = 'Sending …';
  try {
    await call('/events', {user: state.user, type, item: item.item});
  } catch (error) {
    at('act-status').textContent = '';
    throw error;
  }
  const done = label(type) + ' of ' + plainTitle(item) + ' is stored. ';
  at('act-status').textContent = done;
  if (!await recommend({before})) return;
  const fresh = [...state.ranks.keys()].filter(each => !before.has(each)).length;
  const moved = [...state.ranks].filter(([each, rank]) => before.has(each) && before.get(each) !== rank).length;
  at('act-status').textContent = done + (state.basket.length ? 'The basket answers in place of the history: empty it to see the difference.'
    : fresh + moved ? 'The answer has changed: ' + count(fresh, 'new item') + ', ' + moved + ' moved.' : 'The answer stays as it was.');
  look();
}

/* What an event changed for an item of the list. */
function changed(item, before) {
  if (!before) return [];
  const was = before.get(item.item);
  return was === undefined ? ['new'] : was === item.rank ? [] : ['was number ' + was];
}
