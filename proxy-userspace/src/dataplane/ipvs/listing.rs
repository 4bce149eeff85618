//! What the kernel holds but for rules, as text: to be compared with what upstream's mode leaves in the same place.

use std::net::IpAddr;

use super::{claims::Item, state::State};

impl State {
    /// A line for each virtual server (`server TCP 10.96.0.10:80 rr persistent 10800`), each real server (`real`, its virtual one,
    /// its address, its weight), each set (`set`, its name, its type and options), each entry of one (`entry`, the set's name,
    /// the entry with protocols as numbers) and each address of the dummy link (`address 10.96.0.10/32`). In no order.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (key, running) in &self.servers {
            let timeout = running.server.timeout;
            let persistent = if timeout == 0 { String::new() } else { format!(" persistent {timeout}") };
            lines.push(format!("server {key} {}{persistent}", running.server.scheduler));
            let reals = running.reals.iter();
            lines.extend(reals.map(|real| format!("real {key} {} {}", real.address, real.weight)));
        }
        let sets = self.sets.iter();
        lines.extend(sets.map(|(family, set)| format!("set {} {}", set.name(*family), set.made_as(*family))));
        let there = self.items.iter().filter(|(_, presence)| presence.is_there);
        lines.extend(there.filter_map(|(item, _)| match item {
            Item::Entry(..) => Some(format!("entry {item}")),
            Item::NodeDenied(..) => None,
        }));
        let bits = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
        lines.extend(self.addresses.iter().map(|address| format!("address {address}/{}", bits(address))));
        lines
    }
}
