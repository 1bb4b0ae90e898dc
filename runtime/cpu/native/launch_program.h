/* A program in memory and its steps: what native/program.py calls. */
#pragma once
#include "launch.h"
#include "paged_attention.h"

/* A step's rows: T tokens, and R rows of logits. ForwardBatch's arrays as they are. */
struct batch {
    const int64_t *input_ids, *position_ids, *logits_indices; /* [T], [T], [R] */
    int32_t tokens, logits;
    struct step attention;
    const int32_t *state_slots; /* [sequences]: of their side state, below num_states; NULL for models without any */
    int32_t num_states;
    int32_t *is_computing; /* 0 is stored here when the step ends: other threads read it */
};

enum step_result { STEP_DONE, STEP_BAD_TOKEN, STEP_BAD_SIZE };

struct program;

/* The program of `operations`, which the caller keeps for as long as it. The operations from `head_start` on are walked by
 * steps with logits only. isa names an instruction set, NULL the best one. NULL for too little memory, or no such set. */
struct program *program_make(const struct operation *operations, int count, int head_start, int context_tokens, int threads,
                             int max_tokens, const char *isa);
void program_free(struct program *program);

const char *program_isa(const struct program *program);

/* Run a step. seconds: NULL, or [count], to which each operation's time is added. Returns enum step_result. */
int program_step(struct program *program, const struct batch *batch, double *seconds);
