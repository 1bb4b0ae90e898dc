/* Makes room for the next instruction set: see paged_attention_isa.c. */
#undef halves
#undef bytes
#undef pairs
#undef pair_halves
#undef one_half
#undef vwiden
#undef vnibble
#undef vunsigned_nibble
#undef vdot
#undef vstore_bfloats
#undef vround_pair
#undef NAME
#undef TARGET
#undef VECTORS
#undef ROWS
