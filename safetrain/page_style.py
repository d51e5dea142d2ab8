"""How the failure page looks, in light and in dark: one style sheet, inline, without anything from elsewhere."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #ffffff; --line: #e3e2df; --ink: #1c1d21; --soft: #63656e; --faint: #9a9ca4;
  --bad: #b3261e; --bad-wash: #fdf0ee; --bad-line: #f0c4bf; --mark: #fff3c9;
  --gradients: #0f8a7d; --yours: #2f62d9; --control: #a3a5ad; --good: #2c7a4b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131418; --card: #1b1d22; --line: #2e3038; --ink: #e8e8ea; --soft: #a0a3ad; --faint: #6f727c;
    --bad: #ff8a80; --bad-wash: #2d1a1a; --bad-line: #5e2f2c; --mark: #3a3216;
    --gradients: #3fc2b2; --yours: #7ea6ff; --control: #70737d; --good: #74c794;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 36px 28px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
code, pre, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 13px; }
a { color: var(--yours); text-underline-offset: 2px; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; }
.kicker b { color: var(--bad); font-weight: 650; }
h1 { margin: 10px 0 0; font-size: clamp(21px, 2.5vw, 29px); line-height: 1.28; font-weight: 650;
  letter-spacing: -0.012em;
  text-wrap: pretty; overflow-wrap: anywhere; }
h2 { margin: 40px 0 10px; font-size: 15px; font-weight: 650; }
h2 small { margin-left: 8px; color: var(--soft); font-weight: 400; font-size: 13px; }
h1.long { font-size: clamp(18px, 2vw, 21px); line-height: 1.4; }
.lead { font-size: 16px; color: var(--soft); }
b.bad { color: var(--bad); font-weight: 600; }
table.parting td:nth-child(1) { width: 30%; color: var(--soft); } table.parting td:nth-child(2) { width: 26%; }
p { margin: 8px 0; overflow-wrap: anywhere; }
pre { margin: 0; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; }
.more { margin-top: 12px; }
.place { margin: 20px 0 0; padding: 12px 16px; border-left: 3px solid var(--bad); background: var(--bad-wash);
  border-radius: 0 8px 8px 0; overflow-wrap: anywhere; }
.place .where { font-weight: 600; }
.place .what { display: block; margin-top: 4px; white-space: pre-wrap; }
.advice { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 14px; margin-top: 18px; }
.advice div, .box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.advice h3 { margin: 0 0 4px; color: var(--soft); font-size: 13px; font-weight: 500; }
.advice p { margin: 0; }
.others { margin: 16px 0 0; padding-left: 18px; color: var(--soft); }
.user { background: var(--mark); box-shadow: 0 0 0 2px var(--mark); border-radius: 2px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 8px 0 0; }
.note { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 10px 0 0; list-style: none;
  color: var(--soft);
  font-size: 13px; }
.legend i { display: inline-block; width: 9px; height: 13px; margin-right: 7px; border-radius: 3px;
  vertical-align: -2px; }
.legend .g { background: var(--gradients); } .legend .y { background: var(--yours); }
.legend .c { background: var(--control); }
.legend .q { width: 13px; border: 1.5px dashed var(--bad); border-radius: 50%; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { color: var(--soft); font-weight: 500; text-align: left; font-size: 13px; }
th, td { padding: 5px 14px 5px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:first-child > th, tr:first-child > td { border-top: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.box + .box { margin-top: 10px; }
.box h3 { margin: 0; font-size: 15px; font-weight: 600; overflow-wrap: anywhere; }
.box h3 .at { color: var(--soft); font-weight: 400; font-size: 13px; margin-left: 8px; }
.box.bad { border-color: var(--bad-line); }
.box.bad h3 b { color: var(--bad); }
.tag { margin-left: 8px; padding: 1px 7px; border-radius: 20px; color: var(--bad); background: var(--bad-wash);
  font-size: 12px; font-weight: 600; }
details { margin-top: 8px; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); }
summary:hover { color: var(--ink); }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--yours); outline-offset: 2px; border-radius: 3px; }
ol.stack { margin: 8px 0 4px; padding: 0; list-style: none;
  font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace;
  font-size: 12.5px; color: var(--soft); overflow-wrap: anywhere; }
ol.stack li { padding: 1px 8px; }
ol.stack li.mine { color: var(--ink); background: var(--mark); border-radius: 4px; }
ol.stack li.mine + li.mine { border-radius: 0 0 4px 4px; }
ol.stack .source { display: block; padding-left: 2ch; font-weight: 600; white-space: pre-wrap; }
footer { margin-top: 48px; padding-top: 14px; border-top: 1px solid var(--line); color: var(--soft); font-size: 13px;
  }
svg.timeline { display: block; width: 100%; min-width: 820px;
  font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
svg text { fill: var(--ink); }
.lane rect { fill: none; } .lane.culprit rect { fill: var(--bad-wash); stroke: var(--bad-line); }
.lane .name { font-weight: 650; font-size: 13px; } .lane.culprit .name, .lane.culprit .below { fill: var(--bad); }
.lane .below, .doing, .gap text { fill: var(--soft); font-size: 11.5px; }
.doing.bad { fill: var(--bad); font-weight: 600; }
.rail { stroke: var(--line); } .unknown { stroke: var(--faint); stroke-dasharray: 2 5; }
.thread { fill: none; stroke: var(--faint); stroke-width: 0.8; opacity: 0.5; }
.gap path { fill: none; stroke: var(--faint); } .gap text { font-size: 11px; }
.mark { stroke: var(--card); stroke-width: 1; } .mark.gradients { fill: var(--gradients); }
.mark.yours { fill: var(--yours); }
.mark.control { fill: var(--control); } .mark.pending { fill: var(--card); stroke-width: 2; }
.mark.pending.gradients { stroke: var(--gradients); } .mark.pending.yours { stroke: var(--yours); }
.mark.pending.control { stroke: var(--control); }
.bar rect { fill: var(--card); stroke-width: 1.3; } .bar text { font-size: 12px; font-weight: 600; }
.bar.gradients rect { stroke: var(--gradients); } .bar.yours rect { stroke: var(--yours); }
.bar.control rect { stroke: var(--control); } .bar .hatched { fill: url(#open); opacity: 0.22; }
.bar text { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.bar.in rect { stroke: var(--faint); } .hatch { fill: var(--ink); }
.bar.stuck rect, .bar.silent rect { fill: var(--bad); stroke: var(--bad); }
.bar.stuck text, .bar.silent text { fill: var(--paper); stroke: none; }
.death circle { fill: var(--bad); }
.death path { stroke: var(--paper); stroke-width: 2; fill: none; stroke-linecap: round; }
.end { fill: var(--faint); }
.absent circle { fill: var(--card); stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 3 2.4; }
.absent text { fill: var(--bad); font-size: 11px; font-weight: 700; }
.differs line { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; }
.differs text { fill: var(--bad); font-weight: 650; }
@media (max-width: 640px) { body { padding: 20px 14px 40px; } }
@media print { body { max-width: none; } details > * { display: block; } }
""".strip()
