'use strict';
// Tables whose columns sort by a click on their heads.
for (const table of document.querySelectorAll('table.sorts')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    if (!head.textContent || head.dataset.fixed !== undefined) return;
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'descending' || !head.classList.contains('n') && !head.hasAttribute('aria-sort');
      const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rank = (a, b) => {
        const left = key(a), right = key(b), x = Number(left), y = Number(right);
        if (left === '' || right === '') return (left === '') - (right === '');
        return (Number.isNaN(x - y) ? left.localeCompare(right) : x - y) * (down ? 1 : -1);
      };
      const rows = [...body.rows].sort(rank);
      heads.forEach(each => each.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', down ? 'ascending' : 'descending');
      body.append(...rows);
    });
  });
}
