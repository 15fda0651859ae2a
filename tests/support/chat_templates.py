"""Chat templates of many kinds, as checkpoints have them."""

# ruff: noqa: E501

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n"
    "{{ message['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
FOLDED = (  # the system's text goes into the first turn of the user, roles alternate
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' ~ (first if loop.first else '') "
    "~ message['content'] | trim ~ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ONLY = "{{ messages[-1].content }}"
NOTHING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
UPPER = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
SHORTENED = "{% for m in messages %}{{ m.content[:40] }}{% endfor %}"
ESCAPED = "{% for m in messages %}{{ m.content | e }}{% endfor %}"
JSON = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
THINKING = (
    "{%- for m in messages %}{%- set content = m.content %}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUSY = (  # much of what templates use
    "{%- macro turn(role, text) -%}<|im_start|>{{ role }}\n{{ text }}<|im_end|>\n{%- endmacro -%}"
    "{%- set ns = namespace(count=0, seen=[]) -%}{%- for m in messages -%}{%- set ns.count = ns.count + 1 -%}"
    "{%- if m.content is string and m.content.strip() or true -%}{{ turn(m.role, m.content) }}{%- endif -%}"
    "{%- if loop.last and loop.length == ns.count -%}{{ '-' * 3 }}{%- else -%}{{ loop.index0 % 2 }}{%- endif -%}"
    "{%- if ns.count > 99 -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ {'n': ns.count, 'z': [1, 'é']} | tojson(indent=2) }}"
    "{{ ['a', 'b'] | map('upper') | join(', ') }}{{ '%s of %d' | format('x', 1234567) }}{{ '{}:{:>3}'.format(1700000, 2) }}"
    "{%- set text -%}{{ messages | length }}{%- endset -%}{{ text ~ ns.count }}{{ none }}{{ 1.5 }}{{ missing }}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
WHOLE = {"chatml": CHATML, "trimmed": TRIMMED, "thinking": THINKING, "marked": MARKED, "busy": BUSY}
BOMBS = (
    "{{ 'a' * 10**10 }}",
    "{% set n = 10**10 %}{{ 'a' * n }}",
    "{{ [0] * 10**10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a' | indent(10**10) }}",
    "{{ '\n' * 90000 | int }}{{ ('\n' * 90000) | indent(90000) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "{{ (['b'] * 99999) | join('a' * 99999) }}",
    "{{ [1] | batch(10**10, 'x') | list }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "{{ lipsum(10**9) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for a in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=['a']) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=['a']) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x ~ 'a' }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
)
FAULTY = (
    "{{ 1 / 0 }}",
    "{{ 2.0 ** 99999 }}",
    "{{ messages[0].content.nothing.here }}",
    "{{ messages[99].content }}",
    "{{ 'a' + 1 }}",
    "{{ 'a' | no_such_filter }}",
    "{% if %}",
    "{{ raise_exception('this model takes no user') }}",
    "{{ raise_exception(5) }}",
    "{{ ().__class__.__bases__ }}",
    "{{ messages.append(1) }}",
    "{{ strftime_now(5) }}",
    "{{ '%d' % 'a' }}",
    "{{ messages | tojson(5, 6, 7, 8, 9) }}",
    "{{ 'x' | int(base=99) + none }}",
    "{% include 'other' %}",
    "{% import 'os' as os %}",
)
