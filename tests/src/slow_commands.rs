//! Commands that take far longer than anything may wait for, for a proxy that is to be caught while it runs them.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::process::write_script;

/// The file in the folder that makes commands slow as long as it is there.
pub const SLOW_FILE: &str = "slow";
/// The file in the folder that tells that a slow one has begun.
pub const STARTED_FILE: &str = "begun";

/// Makes a program in `folder` that becomes `shunt`, to which these commands take an hour as long as there is the file [`SLOW`]; then
/// there is the file [`BEGUN`]. `when` tells in bash which calls of them do; it may read the command's input into `input`.
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
