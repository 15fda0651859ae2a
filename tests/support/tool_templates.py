"""Chat templates with tools, as the families that we serve write them, shortened."""

# ruff: noqa: E501

HERMES = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "\n\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nCall with <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{% if m.content %}{{- '\n' + m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}{%- set call = call.function %}"
    "{{- '\n<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}{%- if not (m.role == 'tool' or 'tool_calls' in m) %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    '{%- if loop.index0 == 0 and tools %}{{- \'Respond in the format {"name": function name, "parameters": dictionary}.\n\n\' }}'
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{%- endif %}"
    "{{- m.content | trim + '<|eot_id|>' }}{%- elif 'tool_calls' in m %}"
    "{%- if not m.tool_calls | length == 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}"
    "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- set out = call.function | tojson %}{{- out[:-1] }}{%- if not call.id is defined or call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{- ', \"id\": \"' + call.id + '\"}' }}{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + m.content | string + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)
XML = HERMES.replace('"arguments": \' }}', '"parameter": \' }}')  # a syntax without a parser
FORGETFUL = HERMES.replace("{%- for call in m.tool_calls %}", "{%- for call in [] %}")  # drops the calls of the history
