"""Chat templates in the manner of today's models, written for the tests; each uses what its kind is known for."""

# Thinking is kept for the last question only, found by walking the messages backwards (as in Qwen 3).
THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {{- '\\n' + content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# A JSON schema becomes a TypeScript type, by a recursive macro (as in gpt-oss).
TYPES = """\
{%- macro type_of(spec, depth=1) -%}
    {%- if spec.type == "array" -%}
        {{- type_of(spec['items'], depth) + '[]' if spec['items'] else 'any[]' }}
    {%- elif spec.enum is defined -%}
        {{- spec.enum | map('tojson') | join(' | ') }}
    {%- elif spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.type in ["integer", "number"] -%}
        number
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, inner in spec.properties.items() -%}
            {%- set mark = '' if name in (spec.required or []) else '?' -%}
            {{- '  ' * depth ~ name ~ mark ~ ': ' ~ type_of(inner, depth + 1) }}
            {{- ',\\n' if not loop.last else '\\n' }}
        {%- endfor -%}
        {{- '  ' * (depth - 1) ~ "}" }}
    {%- else -%}
        {{- spec.type | default('any', true) }}
    {%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Knowledge: ' ~ strftime_now('%Y') ~ '\\n' }}
{%- for tool in tools or [] %}
    {%- set tool = tool.function or tool %}
    {{- '// ' + (tool.description or '') | replace('\\n', '\\n// ') | trim + '\\n' }}
    {{- 'type ' + tool.name + ' = (_: ' + type_of(tool.parameters) | indent(2) + ') => any;\\n' }}
{%- endfor %}
{{- '<|end|>' }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {%- generation %}
    {{- '<|start|>%s<|message|>%s<|end|>' | format(message.role, message.content or '') }}
    {%- endgeneration %}
{%- endfor %}
"""

# Content is a text or a list of parts, and roles must alternate (as in Gemma 3).
PARTS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# Loop controls, set blocks, a call block and the date (as in SmolLM 3 and Llama 3).
BLOCKS = """\
{%- macro turn(role) -%}<|{{ role }}|>{{ caller() }}<|end|>{%- endmacro -%}
{%- set mode = reasoning_mode | default('/think') if enable_thinking is not false else '/no_think' -%}
{%- set custom = namespace(text='') -%}
{%- for message in messages -%}
    {%- if message.role != 'system' -%}{% continue %}{%- endif -%}
    {%- set custom.text = message.content.replace("/no_think", "").rstrip() -%}
    {%- break -%}
{%- endfor -%}
{%- set system -%}
Today: {{ date_string if date_string is defined else strftime_now("%d %B %Y") }} {{ mode }}
{%- if custom.text %} {{ custom.text | e | upper }}{% endif -%}
{%- endset -%}
{%- call turn('system') %}{{ system }}{% endcall -%}
{%- for role, group in messages | rejectattr('role', 'equalto', 'system') | groupby('role') -%}
    {{ role }}={{ group | map(attribute='content') | map('length') | sum }};
{%- endfor -%}
{%- for message in messages if message.role in ('user', 'assistant') -%}
    {%- filter trim -%}<|{{ message.role }}|>{{ message.content or '' }}{%- endfilter -%}
{%- else -%}nothing{%- endfor -%}
"""

MODEL_TEMPLATES = {"thinking": THINKING, "types": TYPES, "parts": PARTS, "blocks": BLOCKS}
