/* A field that completes what is typed to users or items: the combobox of the ARIA Authoring Practices, with a list. */

class Finder {
  constructor(input, what, {picked, model}) {
    this.input = input;
    this.what = what;
    this.picked = picked;
    this.model = model;
    this.found = [];
    this.place = -1;
    this.asked = 0;
    this.typed = ''; /* where nothing was typed since the last pick, the busiest are listed */
    this.list = make('ul', {id: input.id + '-list', role: 'listbox', hidden: true, 'aria-label': label(what) + 's'});
    input.after(this.list);
    for (const [name, value] of Object.entries({role: 'combobox', 'aria-expanded': 'false', 'aria-controls': this.list.id, 'aria-autocomplete': 'list', autocomplete: 'off', spellcheck: 'false'})) input.setAttribute(name, value);
    input.addEventListener('input', () => { this.typed = input.value; this.later(); });
    input.addEventListener('focus', () => { if (what === 'user') input.select(); });
    input.addEventListener('blur', () => this.close());
    input.addEventListener('keydown', event => this.pressed(event));
  }

  get isOpen() { return !this.list.hidden; }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => trying(() => this.look()), 120);
  }

  async look() {
    const mine = ++this.asked;
    const given = {query: this.typed.trim().slice(0, 200), limit: '8', model: this.model()};
    let found = (await call('/' + this.what + 's' + query(given)))[this.what + 's'];
    if (this.what === 'item') found = await forSale(found);
    if (mine !== this.asked || document.activeElement !== this.input) return;
    this.found = found;
    this.foundFor = given.query;
    this.list.replaceChildren(...found.map((each, place) => make('li', {id: this.input.id + '-' + place, role: 'option', 'aria-selected': 'false', on: {
      mousedown: event => event.preventDefault(), /* the field keeps the focus */
      click: () => this.pick(place),
    }}, make('span', {dir: 'auto'}, each.title ? each.title + ' · ' + each[this.what] : String(each[this.what])), make('small', {}, count(each.count, this.what === 'user' ? 'item' : 'user')))));
    if (!found.length) this.list.append(make('li', {role: 'option', 'aria-disabled': 'true', 'aria-selected': 'false'}, this.what === 'user' ? 'No such user. Press Enter to ask for a new one.' : 'No such item.'));
    this.list.hidden = false;
    this.input.setAttribute('aria-expanded', 'true');
    this.mark(-1);
  }

  close() {
    clearTimeout(this.timer);
    this.asked++;
    this.list.hidden = true;
    this.input.setAttribute('aria-expanded', 'false');
    this.input.removeAttribute('aria-activedescendant');
    this.place = -1;
  }

  mark(place) {
    this.place = place;
    [...this.list.children].forEach((line, number) => line.setAttribute('aria-selected', String(number === place)));
    if (place < 0) { this.input.removeAttribute('aria-activedescendant'); return; }
    this.input.setAttribute('aria-activedescendant', this.list.children[place].id);
    this.list.children[place].scrollIntoView({block: 'nearest'});
  }

  pick(place) {
    const one = this.found[place];
    this.close();
    this.typed = '';
    this.picked(one[this.what], one.title);
  }

  pressed(event) {
    const {key} = event, many = this.found.length;
    if (key === 'Escape') { if (this.isOpen) { event.preventDefault(); this.close(); } }
    else if (key === 'ArrowDown' || key === 'ArrowUp') {
      event.preventDefault();
      if (!this.isOpen) trying(() => this.look());
      else if (many) this.mark((this.place + (key === 'ArrowDown' ? 1 : this.place < 0 ? 0 : -1) + many) % many);
    } else if (key === 'Enter') {
      event.preventDefault();
      const fits = this.isOpen && many && this.foundFor === this.input.value.trim();
      if (this.isOpen && this.place >= 0) this.pick(this.place);
      else if (fits && this.what === 'item') this.pick(0); /* the best match; a user may be a new one */
      else {
        this.close();
        this.typed = '';
        this.picked(this.input.value.trim(), null);
      }
    }
  }
}
