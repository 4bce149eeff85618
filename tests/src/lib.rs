//! shunt's test world: hosts as network namespaces, the runner of conformance cases, and the demo.

pub mod agent;
pub mod case;
pub mod deadline;
pub mod flow;
pub mod interrupt;
pub mod process;
pub mod runner;
pub mod world;
