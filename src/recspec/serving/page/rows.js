/* Rows to score: one from controls, many from JSON or CSV. */

let rowFields = [];

function showRows(model, columns) {
  rowFields = columns.rows.map(column => ({name: column.name, ...valueField(column, {begin: true})}));
  at('row-fields').replaceChildren(...rowFields.map(each => each.element));
  at('row-note').textContent = count(columns.rows.length, 'column') + '. A field that is left empty counts as missing.';
  at('score-head').textContent = model.probabilities ? 'Probability' : 'Score';
  at('text').value = '';
  at('scores').hidden = true;
  at('row-status').textContent = '';
  at('row-notes').replaceChildren();
}

function rowOfFields() {
  return Object.fromEntries(rowFields.map(each => [each.name, each.value() ?? null]));
}

async function scoreRows(rows) {
  at('row-status').textContent = 'Scoring …';
  let data;
  try {
    data = await call('/predict', {model: shown.model, rows});
  } catch (error) {
    at('row-status').textContent = '';
    throw error;
  }
  const ranks = !data.probabilities, found = data.probabilities ?? data.scores;
  const one = found.length === 1 ? ': ' + (ranks ? digits(found[0], 4) : percent(found[0])) : '';
  at('row-status').textContent = count(found.length, 'row') + one + ', in ' + milliseconds(data.milliseconds) + (found.length > 1000 ? '; the first 1,000 are shown' : '');
  at('scores').hidden = !found.length;
  at('scores').tBodies[0].replaceChildren(...found.slice(0, 1000).map((each, place) => make('tr', {},
    make('td', {className: 'number'}, String(place + 1)), make('td', {className: 'number'}, each.toPrecision(4)), make('td', {}, ranks ? null : track(each)))));
  at('row-notes').replaceChildren(...data.notes.map(note => make('li', {}, note)));
}

function parse(written) {
  const trimmed = written.trim();
  if (!trimmed) throw new Error('Paste a row first.');
  if (/^[[{]/.test(trimmed)) {
    let data;
    try { data = JSON.parse(trimmed); } catch (error) { throw new Error('The rows are not JSON: ' + error.message); }
    return Array.isArray(data) ? data : [data];
  }
  const [names, ...rows] = csv(trimmed);
  if (!rows.length) throw new Error('CSV needs a line with the names of the columns, and a row below it.');
  return rows.map((cells, number) => {
    if (cells.length !== names.length) {
      throw new Error('Row ' + (number + 1) + ' has ' + cells.length + ' values for ' + names.length + ' columns.');
    }
    return Object.fromEntries(names.map((name, place) => [name.trim(), cell(cells[place])]));
  });
}

function csv(written) {
  const rows = [[]];
  let value = '', inQuotes = false;
  for (let place = 0; place < written.length; place++) {
    const sign = written[place];
    if (inQuotes) {
      if (sign !== '"') value += sign;
      else if (written[place + 1] === '"') { value += '"'; place++; }
      else inQuotes = false;
    } else if (sign === '"' && value.trim() === '') { value = ''; inQuotes = true; }
    else if (sign === ',') { rows[rows.length - 1].push(value); value = ''; }
    else if (sign === '\n') { rows[rows.length - 1].push(value); value = ''; rows.push([]); }
    else if (sign !== '\r') value += sign;
  }
  rows[rows.length - 1].push(value);
  return rows.filter(row => row.length > 1 || row[0].trim());
}

at('row').addEventListener('submit', event => { event.preventDefault(); trying(() => scoreRows([rowOfFields()])); });
at('paste').addEventListener('submit', event => { event.preventDefault(); trying(() => scoreRows(parse(at('text').value))); });
at('many').addEventListener('toggle', () => { if (at('many').open && !at('text').value) at('text').value = JSON.stringify([rowOfFields()], null, 1); });
