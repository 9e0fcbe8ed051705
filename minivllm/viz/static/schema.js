// Written by `minivllm.viz.tables.write()` from the Python side: do not edit.
export const WAITING = 0, PREEMPTED = 1, SWAPPED = 2, REMOTE = 3, STALLED = 4, PREFILL = 5, DECODE = 6; // timeline_data.py
export const CACHED = 0, HIT = 1, EVICTED = 2, FORGOTTEN = 3; // prefix_data.py
export const KINDS = ["step", "add", "attributes", "admit", "alloc", "hit", "cache", "uncache", "skip", "free", "evict", "preempt", "swap_out", "free_cpu", "schedule", "update", "finish", "reset", "wait", "chunk", "order", "policy_error", "note", "draft", "rollback", "lora_load", "lora_evict", "verify", "encode", "encoder_evict", "experts", "kv_load", "kv_save", "kv_wait", "kv_arrive", "kv_keep", "kv_release", "route"]; // kinds of events; a number in the stream is an index here
export const WIRE = {"add": ["request"], "admit": ["request", "num_computed", "num_cached"], "alloc": ["request", "group", "blocks"], "hit": ["request", "group", "blocks"], "cache": ["request", "group", "positions"], "uncache": ["request", "group", "blocks"], "skip": ["request", "group", "start", "end", "blocks"], "free": ["request", "group", "blocks"], "evict": ["block"], "preempt": ["request", "mode", "needed_by", "chosen_by"], "swap_out": ["request", "pairs"], "free_cpu": ["request", "blocks"], "schedule": ["num_scheduled"], "rollback": ["num_rejected"], "finish": ["request", "reason"], "reset": [], "kv_load": ["request", "group", "blocks"], "kv_wait": ["request"], "kv_arrive": ["request", "num_computed"], "kv_keep": ["request", "blocks"], "kv_release": ["owner", "blocks"]}; // the events that travel, and their fields
export const STATUSES = ["WAITING", "RUNNING", "PREEMPTED", "SWAPPED", "WAITING_FOR_REMOTE_KVS"]; // of a request
export const MODES = ["recompute", "swap"]; // of a preemption
export const FINISHES = ["unfinished", "stop", "length", "abort", "error"]; // ends of a request
export const TREE_KINDS = ["in use", "kept", "lost", "not yet cached"]; // how a cached block stands
export const OWNER_COLOURS = 8; // colours of requests, given again and again
export const DECODE_TINT = 0.62; // how much of a request's colour is left where it decodes
export const MADE_UP = 16777216; // token ids from here on are made up by the lab
