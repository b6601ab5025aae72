"""How a report looks."""

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#5b6570;--line:#d9dee4;--bad:#b3261e;--good:#1a7f37;
--model:#2563c9;--world:#c2700a;--prompt:#98a2ae;--c0:#2563c9;--c1:#c2570a;--c2:#1f8a4c;--c3:#b3261e;--c4:#7a3fc2;--c5:#0f7f8c}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2026;--ink:#e3e7ec;--dim:#98a2ad;--line:#323943;--bad:#ff8f86;
--good:#6fd08c;--model:#6ea3ff;--world:#e59a3c;--prompt:#77828e;--c0:#6ea3ff;--c1:#ef9a4f;--c2:#5cc98a;--c3:#ff8f86;--c4:#bd93f9;--c5:#56c8d6}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1300px;padding:24px;background:var(--bg);color:var(--ink);
font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1{margin:0 0 8px}h2{margin:26px 0 8px}h3{font-size:15px;margin:20px 0 6px;overflow-wrap:anywhere}h4{margin:0;font-family:monospace}
.dim,dt{color:var(--dim)}.bad{color:var(--bad)}.facts{display:flex;flex-wrap:wrap;gap:4px 26px;margin:0}.facts dt{font-size:12px}
.facts dd{margin:0 0 0 -20px;align-self:end;font-weight:600}.found{list-style:none;padding:0;margin:0;display:grid;gap:5px}
.found li{background:var(--card);border-left:3px solid var(--dim);padding:5px 10px;overflow-wrap:anywhere;color:var(--ink)}
.found .bad{border-color:var(--bad)}.found .good{border-color:var(--good)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:12px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:9px 10px 4px}
figcaption{display:flex;flex-wrap:wrap;gap:0 12px;font-size:13px}svg{width:100%;display:block}svg text{fill:var(--dim);font-size:11px}
path{fill:none;stroke:currentColor;stroke-width:1.8}circle{fill:currentColor}.grid{stroke:var(--line)}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:12px;align-items:start}
article{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px;min-width:0}article p{margin:4px 0 8px;overflow-wrap:anywhere}
.message{border-left:3px solid var(--prompt);padding:2px 10px;margin:6px 0;overflow:hidden;overflow-wrap:anywhere;font-size:13px}
.message.model{border-color:var(--model)}.message.world{border-color:var(--world)}bdi{unicode-bidi:isolate;white-space:pre-wrap;font-family:monospace}
.status{float:right;font-size:12px;color:var(--dim)}.status.bad{color:var(--bad)}
"""
