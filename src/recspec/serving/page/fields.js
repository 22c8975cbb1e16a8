/* Controls made from columns: values of a context or a row, and tests of a filter. */

let numbered = 0;

/* A named control with its label. */
function labelled(text, control, ...more) {
  control.id = 'field-' + ++numbered;
  return make('div', {}, make('label', {for: control.id}, text), control, more);
}

function choices(legend, values) {
  const boxes = values.map(value => {
    const box = make('input', {type: 'checkbox', id: 'field-' + ++numbered});
    return {value, box, line: make('div', {className: 'check'}, box, make('label', {for: box.id, dir: 'auto'}, said(value)))};
  });
  const set = make('fieldset', {}, make('legend', {}, legend), make('div', {className: 'choices'}, boxes.map(each => each.line)));
  return {
    element: set,
    get chosen() { return boxes.filter(each => each.box.checked).map(each => each.value); },
    clear() { for (const each of boxes) each.box.checked = false; },
  };
}

function select(values, first) {
  const made = make('select', {}, make('option', {value: ''}, first));
  values.forEach((value, place) => made.append(make('option', {value: String(place)}, said(value))));
  return made;
}

const numeric = (column, given) => make('input', {type: 'number', step: column.is_whole ? '1' : 'any', ...given});
const text = given => make('input', {type: 'text', autocomplete: 'off', spellcheck: false, ...given});

/* A control for one value: {element, value()}, where undefined means that nothing is given. */
function valueField(column, {begin}) {
  const name = label(column.name), example = begin ? column.example : null;
  if (column.kind === 'choice') {
    const control = select(column.values, column.is_required ? 'choose …' : 'not given');
    const place = column.values.indexOf(example);
    if (place >= 0) control.value = String(place);
    return {element: labelled(name, control), value: () => control.value === '' ? undefined : column.values[Number(control.value)]};
  }
  if (column.kind === 'choices') {
    const set = choices(name, column.values);
    return {element: set.element, value: () => set.chosen.length ? set.chosen : undefined};
  }
  if (column.kind === 'number') {
    const range = column.low !== null && column.high !== null ? said(column.low) + ' to ' + said(column.high) : '';
    const control = numeric(column, {placeholder: range, value: example ?? ''});
    return {element: labelled(name, control), value: () => control.value === '' ? undefined : Number(control.value)};
  }
  const control = text({value: example ?? '', maxLength: 1000, placeholder: column.kind === 'other' ? 'values, with commas between them' : ''});
  const value = () => {
    const typed = control.value.trim();
    if (typed === '') return undefined;
    return column.kind === 'other' ? typed.split(',').map(each => cell(each)) : typed;
  };
  return {element: labelled(name, control), value};
}

/* --- filters ---------------------------------------------------------------------------------------------------- */

const WORDS = new Set(['and', 'or', 'not', 'in', 'contains', 'is', 'missing', 'null', 'true', 'false']);
const quoted = value => typeof value === 'string' ? "'" + value.replaceAll("'", "''") + "'" : String(value);
const named = name => /^[A-Za-z_][A-Za-z0-9_.]*$/.test(name) && !WORDS.has(name.toLowerCase()) ? name : '`' + name + '`';
const joined = (tests, word) => tests.length > 1 ? '(' + tests.join(' ' + word + ' ') + ')' : tests[0];

/* A control for one column of the catalogue: {element, test(), clear()}; null where none can be made. */
function filterField(column) {
  if (column.name.includes('`')) return null;
  const name = named(column.name), shown = label(column.name);
  if (column.kind === 'choice') {
    const set = choices(shown, column.values);
    return {element: set.element, clear: () => set.clear(), test: () => set.chosen.length ? name + ' in (' + set.chosen.map(quoted).join(', ') + ')' : ''};
  }
  if (column.kind === 'choices') {
    const set = choices(shown, column.values);
    return {element: set.element, clear: () => set.clear(), test: () => set.chosen.length ? joined(set.chosen.map(value => name + ' contains ' + quoted(value)), 'or') : ''};
  }
  if (column.kind === 'truth') {
    const control = select(['yes', 'no'], 'any');
    return {element: labelled(shown, control), clear: () => { control.value = ''; }, test: () => control.value === '' ? '' : name + (control.value === '0' ? ' == true' : ' == false')};
  }
  if (column.kind === 'number' || column.kind === 'date') {
    const ends = [['from', '>=', column.low], ['to', '<=', column.high]].map(([word, sign, limit]) => {
      const control = column.kind === 'number'
        ? numeric(column, {placeholder: word + ' ' + said(limit)})
        : make('input', {type: 'date', min: column.low, max: column.high});
      control.setAttribute('aria-label', shown + ' ' + word);
      return {control, sign};
    });
    /* the last day counts as a whole */
    const written = (value, sign) => column.kind === 'number' ? value : quoted(sign === '<=' ? value + 'T23:59:59' : value);
    const element = make('fieldset', {}, make('legend', {}, shown), make('div', {className: 'pair'}, ends.map(each => each.control)));
    const test = () => ends.filter(each => each.control.value !== '').map(each => name + ' ' + each.sign + ' ' + written(each.control.value, each.sign)).join(' and ');
    return {element, test, clear: () => { for (const each of ends) each.control.value = ''; }};
  }
  if (column.kind === 'text') {
    const control = text({maxLength: 200, placeholder: 'contains …'});
    return {element: labelled(shown, control), clear: () => { control.value = ''; }, test: () => control.value.trim() ? name + ' contains ' + quoted(control.value.trim()) : ''};
  }
  return null;
}

/* --- rows of CSV, in which numbers are numbers and all else is text ----------------------------------------------- */

function cell(written) {
  const plain = written.trim();
  if (plain === '') return null;
  return /^-?(0|[1-9]\d{0,14})(\.\d+)?([eE][-+]?\d{1,2})?$/.test(plain) ? Number(plain) : plain;
}
