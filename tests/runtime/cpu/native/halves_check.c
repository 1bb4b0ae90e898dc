/* Writes all 65,536 float16 numbers as float32 to standard output, as kv_precision.h converts them one by one. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kv_precision.h"

int main(void)
{
    for (uint32_t half = 0; half < 65536; half++) {
        const float x = float_of_half((uint16_t)half);
        fwrite(&x, sizeof x, 1, stdout);
    }
    return 0;
}
