//! Unpacks qemu into target/tools if apt would have to remove packages to install it, for example
//! because another version of `qemu-utils` is installed. Nothing else on the machine changes.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use xtask::{search, workspace};

use super::apt;
use super::tools::Tool;
use crate::cli::progress::Progress;

/// dpkg's list of installed packages.
const STATUS: &str = "/var/lib/dpkg/status";
/// The script that starts qemu with the libraries and the firmware in the folder of its name.
const START: &str = r#"#!/bin/sh
name=$(basename -- "$0")
root=$(dirname -- "$0")/../$name
LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH
exec "$root/usr/bin/$name" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@"
"#;

/// Unpacks the packages `names` of qemu and their missing dependencies. `in_the_way` are the
/// packages that apt would remove.
pub(crate) fn unpack(qemu: &Tool, names: &[String], in_the_way: &[String]) -> Result<()> {
    let (wanted, removed) = (names.join(" "), in_the_way.join(" "));
    eprintln!("installing {wanted} would remove {removed}, so it is unpacked into target/tools");
    Progress::during(&format!("unpack {}", qemu.name), |progress| {
        fetch(qemu, names, in_the_way, &mut |line| progress.line(line))
    })
}

fn fetch(qemu: &Tool, names: &[String], in_the_way: &[String], each: &mut dyn FnMut(&str)) -> Result<()> {
    let tools = workspace::tools();
    fs::create_dir_all(&tools).context("cannot create the folder for tools")?;
    let work = tempfile::tempdir_in(&tools).context("cannot create a folder to unpack in")?;
    let known = fs::read(STATUS).with_context(|| format!("cannot read {STATUS}"))?;
    let status = work.path().join("status");
    fs::write(&status, without(&String::from_utf8_lossy(&known), in_the_way))
        .context("cannot write the package list for apt")?;
    let (archives, unpacked) = (work.path().join("archives"), work.path().join("unpacked"));
    apt::download(names, &status, &archives, each)?;
    apt::unpack_all(&archives, &unpacked, each)?;
    let root = tools.join(qemu.name);
    // A program that is there did not run.
    drop(fs::remove_dir_all(&root));
    fs::rename(&unpacked, &root).context("cannot move qemu to the tools")?;
    write_start(qemu, &search::own_programs())
}

fn write_start(qemu: &Tool, folder: &Path) -> Result<()> {
    let start = folder.join(qemu.name);
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&start, START))
        .and_then(|()| fs::set_permissions(&start, Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", start.display()))
}

/// Returns dpkg's list without some packages.
fn without(status: &str, packages: &[String]) -> String {
    let is_kept = |paragraph: &&str| {
        let name = paragraph.lines().find_map(|line| line.strip_prefix("Package: "));
        name.is_none_or(|name| packages.iter().all(|package| package != name))
    };
    let kept: Vec<&str> = status.split("\n\n").filter(is_kept).collect();
    kept.join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::super::tools::QEMU;
    use super::*;

    #[test]
    fn package_list_lacks_only_the_packages_in_the_way() {
        let status = "Package: qemu-utils\nStatus: install ok installed\nVersion: 10\n\n\
                      Package: qemu-utils-doc\nVersion: 10\n\nPackage: kmod\nVersion: 30\n";
        assert_eq!(
            without(status, &["qemu-utils".into()]),
            "Package: qemu-utils-doc\nVersion: 10\n\nPackage: kmod\nVersion: 30\n"
        );
        assert_eq!(without(status, &[]), status);
    }

    #[test]
    fn start_script_runs_the_qemu_beside_it() {
        let tools = tempfile::tempdir().unwrap();
        let program = tools.path().join(QEMU.name).join("usr/bin").join(QEMU.name);
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        fs::write(&program, "#!/bin/sh\necho \"$1 ${2##*/} $5 $LD_LIBRARY_PATH\"\n").unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        write_start(&QEMU, &tools.path().join("bin")).unwrap();
        let said =
            xtask::run::Run::new(tools.path().join("bin").join(QEMU.name)).arg("--version").read().unwrap();
        assert!(said.starts_with("-L qemu --version /"), "{said}");
        assert!(said.contains("/bin/../qemu-system-x86_64/usr/lib/x86_64-linux-gnu:"), "{said}");
    }
}
