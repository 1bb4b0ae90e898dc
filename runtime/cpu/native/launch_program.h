/* A program in memory and its steps: what native/program.py calls. */
#pragma once
#include "launch.h"
#include "paged_attention.h"
#include "tensor_parallel.h"

/* A step's rows: T tokens, and R rows of logits. ForwardBatch's arrays as they are. */
struct batch {
    const int64_t *input_ids, *position_ids, *logits_indices; /* [T], [T], [R] */
    int32_t tokens, logits;
    struct step attention;
    const int32_t *state_slots; /* [sequences]: of their side state, below num_states; NULL for models without any */
    int32_t num_states;
    const int32_t *adapter_slots; /* [sequences]: of their adapters, -1 for none; NULL where none has one */
    int32_t *is_computing; /* 0 is stored here when the step ends: other threads read it */
    int32_t begin, end;    /* the operations to walk: all, or those of a stage */
};

struct program;

/* The program of `operations`, which the caller keeps for as long as it. The operations from `head_start` on are walked by
 * steps with logits only. last_mixing is the model's last operation that reads other tokens of a sequence, -1 if another
 * program has it. isa names an instruction set, NULL the best one. NULL for too little memory, or no such set. */
struct program *program_make(const struct operation *operations, int count, int head_start, int last_mixing,
                             int context_tokens, int threads, int max_tokens, const char *isa);
void program_free(struct program *program);

/* Make this process's part of each operation from now on, and exchange it with the others of the group, whose steps are the
 * same. The caller keeps what `group` refers to. */
void program_join(struct program *program, const struct rank_group *group);

const char *program_isa(const struct program *program);

/* Make room for adapters in slots 0 .. slots - 1 whose A has up to `ranks` rows, of one operation together. What was there stays;
 * neither may become less. Returns -1 for too little memory, with which all is as before. */
int program_reserve_adapters(struct program *program, int slots, int ranks);

/* Let the sequences of a slot have an adapter: changes [count], NULL where it does not change the operation. All stay the
 * caller's, who keeps them until the slot has another. changes NULL: the slot is free. */
void program_set_adapter(struct program *program, int slot, const struct low_rank *const *changes);

/* Run a step. seconds: NULL, or [count], to which each operation's time is added. Returns enum step_result. */
int program_step(struct program *program, const struct batch *batch, double *seconds);
