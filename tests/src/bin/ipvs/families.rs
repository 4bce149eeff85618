//! A family whose iptables does not work, and an iptables without the matches that some Services
//! need. Everything else is served and receives changes.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail, ensure};
use proxy_userspace::{
    dataplane::{
        Dataplane as _, FailureScope,
        ipvs::{Ipvs, IpvsError, IpvsSettings},
    },
    kernel::command::Launcher,
    model::{IpFamily, Protocol},
};
use shunt_tests::process::write_script;

use crate::node::{Node, cluster_ip, endpoints, every_kind, of_ports, service};

/// Writes a command that fails while the file `broken` exists in its directory, and otherwise runs
/// the real command.
fn breakable(directory: &Path, program: &str, real: &Path) -> io::Result<()> {
    let file = directory.join(program);
    let broken = directory.join("broken");
    let text = format!(
        "#!/bin/sh\nif [ -e {} ]; then echo 'no IPv6 for you' >&2; exit 3; fi\nexec {} \"$@\"\n",
        broken.display(),
        real.display()
    );
    write_script(&file, &text)
}

/// Writes a command that refuses rules with the matches `ipvs` and `physdev`, and otherwise runs
/// the real command.
fn without_matches(directory: &Path, program: &str, real: &Path) -> io::Result<()> {
    let real = real.display();
    // A guest has no `cat` in the usual directories.
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in *--version*) exec {real} \"$@\";; esac\n\
         input=$(while IFS= read -r line; do printf '%s\\n' \"$line\"; done)\n\
         case \"$input\" in *'-m ipvs'*|*'-m physdev'*) echo 'no such match' >&2; exit 2;; esac\n\
         printf '%s\\n' \"$input\" | {real} \"$@\"\n"
    );
    write_script(&directory.join(program), &text)
}

/// Writes a command in a directory that stands for a real one.
type StandIn = fn(&Path, &str, &Path) -> io::Result<()>;

/// Returns a launcher of this machine's commands, with stand-ins for those for which there is one.
fn launcher(directory: &Path, stand_in: fn(IpFamily, &str) -> Option<StandIn>) -> Result<Launcher> {
    fs::create_dir_all(directory)?;
    let all = Launcher::default();
    let kinds = ["nft", "legacy"].map(|kind| ["save", "restore"].map(|verb| format!("tables-{kind}-{verb}")));
    for name in kinds.as_flattened() {
        for (family, prefix) in [(IpFamily::V4, "ip"), (IpFamily::V6, "ip6")] {
            let program = format!("{prefix}{name}");
            let Some(real) = all.find(&program) else { continue };
            match stand_in(family, name) {
                Some(write) => write(directory, &program, &real)?,
                None => symlink(&real, directory.join(&program))?,
            }
        }
    }
    for program in ["ipset", "modprobe", "sh"] {
        if let Some(real) = all.find(program) {
            symlink(real, directory.join(program))?;
        }
    }
    Ok(Launcher::only_in([directory.to_owned()]))
}

fn servers(node: &Node) -> Result<Vec<String>> {
    Ok(node.ipvs(proxy_userspace::kernel::ipvs::Ipvs::servers)?.keys().map(ToString::to_string).collect())
}

pub(super) fn fail_separately(node: &mut Node) -> Result<()> {
    let directory: PathBuf = node.world().directory().join("commands");
    let broken = directory.join("broken");
    let settings = IpvsSettings {
        launcher: launcher(&directory, |family, _| (family == IpFamily::V6).then_some(breakable))?,
        ..IpvsSettings::default()
    };
    // A family whose commands fail at the start would be left out for good.
    let mut mode = node.mode(settings)?;
    fs::write(&broken, "")?;
    let v6 = || service("web6", "fd96::1".parse().expect("an address"), Protocol::Tcp, &[]);
    let web = |number: u16, pods: &[u8]| {
        service(&format!("s{number}"), cluster_ip(number), Protocol::Tcp, &endpoints(pods))
    };
    let first = of_ports([web(0, &[1]), v6()]);
    match mode.try_sync(node, &first)? {
        Err(error) if Ipvs::failure_scope(&error) == FailureScope::Family(IpFamily::V6) => {
            ensure!(error.to_string().contains("no IPv6 for you"), "{error}");
        }
        other => bail!("{other:?}"),
    }
    let rules = node.run("iptables-save -t nat")?;
    ensure!(rules.contains("KUBE-CLUSTER-IP"), "{rules}");
    ensure!(servers(node)?.contains(&"TCP 10.96.0.1:80".to_owned()), "{:?}", servers(node)?);
    // A change of IPv4 succeeds and runs no command of IPv6.
    let both = of_ports([web(0, &[1]), web(3, &[1, 2]), v6()]);
    mode.change(node, &both, "s3")?;
    ensure!(servers(node)?.contains(&"TCP 10.96.0.4:80".to_owned()), "{:?}", servers(node)?);
    // When the commands work again, a full sync writes what is missing and nothing else.
    fs::remove_file(&broken)?;
    mode.sync(node, &both)?;
    let rules = node.run("ip6tables-save -t nat")?;
    ensure!(rules.contains("KUBE-6-CLUSTER-IP"), "{rules}");
    let again = mode.plan(node, &both)?;
    ensure!(again.is_empty(), "{again}");
    mode.clean_up(node)
}

pub(super) fn without_some_matches(node: &mut Node) -> Result<()> {
    let directory: PathBuf = node.world().directory().join("fewer-matches");
    let stand_in = |_, name: &str| name.ends_with("restore").then_some(without_matches as StandIn);
    let settings = IpvsSettings { launcher: launcher(&directory, stand_in)?, ..IpvsSettings::default() };
    let mut mode = node.mode(settings)?;
    let all = every_kind();
    ensure!(mode.try_sync(node, &all)?.is_err(), "iptables-restore refuses the first rules");
    // From then on, only load-balancer IPs whose source ranges do not contain the node are left
    // out.
    match mode.try_sync(node, &all)? {
        Err(error @ IpvsError::LeftOut { count: 2, .. }) => {
            ensure!(error.to_string().contains("default/guarded"), "{error}");
        }
        other => bail!("{other:?}"),
    }
    let rules = node.run("iptables-save -t nat")?;
    ensure!(rules.contains("--match-set KUBE-EXTERNAL-IP dst,dst") && !rules.contains("physdev"), "{rules}");
    let servers = servers(node)?;
    let is_there = |address: &str| servers.iter().any(|server| server == address);
    ensure!(is_there("TCP 198.51.100.11:80") && !is_there("TCP 198.51.100.12:80"), "{servers:?}");
    ensure!(is_there("TCP 198.51.100.2:80") && is_there("TCP 10.96.0.2:80"), "{servers:?}");
    let again = mode.plan(node, &all)?;
    ensure!(again.is_empty(), "{again}");
    mode.clean_up(node)
}

pub(super) fn ipv6_is_disabled(node: &mut Node) -> Result<()> {
    let v6 = || service("web6", "fd96::1".parse().expect("an address"), Protocol::Tcp, &[]);
    let v4 = |number| service(&format!("s{number}"), cluster_ip(number), Protocol::Tcp, &endpoints(&[1]));
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_ports([v4(0), v6()]))?;
    // If it is disabled later, the link rejects the addresses.
    node.run("sysctl -q net.ipv6.conf.kube-ipvs0.disable_ipv6=1")?;
    // The second sync removes the virtual server of the address.
    for _ in 0..2 {
        match mode.try_sync(node, &of_ports([v4(0), v4(1), v6()]))? {
            Err(IpvsError::LeftOut { count: 1, .. }) => {}
            other => bail!("{other:?}"),
        }
    }
    ensure!(servers(node)?.contains(&"TCP 10.96.0.2:80".to_owned()), "{:?}", servers(node)?);
    mode.clean_up(node)?;
    // If it is disabled before the start, IPv6 is not served.
    node.run("sysctl -q net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1")?;
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_ports([v4(0), v6()]))?;
    ensure!(servers(node)? == ["TCP 10.96.0.1:80"], "{:?}", servers(node)?);
    mode.clean_up(node)
}
