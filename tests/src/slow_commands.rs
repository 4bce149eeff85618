//! Replaces commands by ones that take very long, for tests that interrupt the proxy while a
//! command runs.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::process::write_script;

/// While this file exists in the folder, commands are slow.
pub const SLOW_FILE: &str = "slow";
/// This file appears in the folder when a slow command has started.
pub const STARTED_FILE: &str = "begun";

/// Creates a program in `folder` that runs `shunt` with slow versions of these commands in its
/// path. While the file [`SLOW_FILE`] exists, a command creates [`STARTED_FILE`] and sleeps for an
/// hour. `when` is a bash condition that selects the calls to slow down; it may read the command's
/// input into `input`.
pub fn with_slow_commands(folder: &Path, shunt: &Path, commands: &[&str], when: &str) -> io::Result<PathBuf> {
    let make = |name: &str, script: String| -> io::Result<PathBuf> {
        let path = folder.join(name);
        write_script(&path, &format!("#!/bin/bash\n{script}\n")).map(|()| path)
    };
    let own = folder.display();
    for name in commands {
        let script = format!(
            "if {when} && [ -e {own}/{SLOW_FILE} ]; then touch {own}/{STARTED_FILE}; sleep 3600; fi\n\
             PATH=${{PATH#{own}:}}\n\
             [ -z \"$input\" ] || exec {name} \"$@\" <<<\"$input\"\n\
             exec {name} \"$@\""
        );
        make(name, script)?;
    }
    make("shunt-with-slow-commands", format!("PATH={own}:$PATH exec {} \"$@\"", shunt.display()))
}
