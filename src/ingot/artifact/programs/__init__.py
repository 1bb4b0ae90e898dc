"""Programs in artifacts: their operations, launches, plans and recurrent layers as plain data, and the checks of them.

How a program is made belongs in `pipeline`, how it runs in `runtime`.
"""
