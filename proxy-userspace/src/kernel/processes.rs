//! Finds processes by name, to report them.

use std::fs;

/// Returns the IDs of the processes with this name (`/proc/PID/comm`) in the network namespace of
/// the caller. A container sees only processes of its own process namespace.
pub fn named(name: &str) -> Vec<u32> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let own = namespace("self");
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_wanted = |id: &u32| {
        fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|comm| comm.trim_end() == name)
            && own.is_some()
            && namespace(&id.to_string()) == own
    };
    let mut found: Vec<u32> = processes.filter(is_wanted).collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_name() {
        let own = fs::read_to_string("/proc/self/comm").expect("a name");
        assert!(named(own.trim_end()).contains(&std::process::id()));
        assert!(named("no-such-process").is_empty());
    }
}
