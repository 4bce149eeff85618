//! The state of the live table: what is shown, and what keys change.

use std::time::Duration;

use super::{Rows, Sample, Sorting, TopArguments, TopRow, View, arguments::is_number, sort_and_filter};
use crate::{health::NodeReport, inspect::ServiceName};

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A character.
    Character(char),
    /// Cursor up.
    Up,
    /// Cursor down.
    Down,
    /// Cursor left.
    Left,
    /// Cursor right.
    Right,
    /// A page up.
    PageUp,
    /// A page down.
    PageDown,
    /// To the first row.
    Home,
    /// To the last row.
    End,
    /// Enter.
    Enter,
    /// Escape.
    Escape,
    /// Tab.
    Tab,
    /// Backspace.
    Backspace,
    /// Ctrl-C.
    Interrupt,
}

/// What has to be done after a key, besides drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Draw,
    /// Another table is shown: its rows must be read.
    Read,
    /// The end.
    Quit,
}

/// How a table is shown.
#[derive(Clone, Debug)]
struct Table {
    sorting: Sorting,
    filter: String,
    /// The id of the chosen row. It stays chosen wherever it moves. `None` if nobody chose one.
    chosen: Option<String>,
    /// The index of that row, or of the one that took its place.
    position: usize,
    /// The index of the first row on the screen.
    first: usize,
}

/// The live table.
#[derive(Debug)]
pub struct Screen {
    pub(super) view: View,
    pub(super) service: Option<ServiceName>,
    tables: [Table; View::ALL.len()],
    pub(super) is_typing: bool,
    pub(super) is_paused: bool,
    pub(super) has_help: bool,
    pub(super) interval: Duration,
    pub(super) rows: Rows,
    /// The indexes of the rows that are shown, in order.
    pub(super) shown: Vec<usize>,
    pub(super) node: Option<NodeReport>,
    pub(super) problem: Option<String>,
    /// The number of rows that fit.
    height: usize,
}

impl Screen {
    /// Shows what the arguments say. There are no rows yet.
    pub fn new(arguments: &TopArguments) -> Self {
        let table = |view: View| {
            let is_asked = view == arguments.view;
            let sorting = if is_asked { arguments.sorting } else { view.first_sorting() };
            let filter = if is_asked { arguments.filter.clone() } else { String::new() };
            Table { sorting, filter, chosen: None, position: 0, first: 0 }
        };
        Self {
            view: arguments.view,
            service: arguments.service.clone(),
            tables: View::ALL.map(table),
            is_typing: false,
            is_paused: false,
            has_help: false,
            interval: arguments.interval,
            rows: Rows::none(arguments.view),
            shown: Vec::new(),
            node: None,
            problem: None,
            height: 1,
        }
    }

    /// Returns what has to be read: the view, and the Service whose endpoints it shows.
    pub fn wanted(&self) -> (View, Option<ServiceName>) {
        (self.view, self.service.clone().filter(|_| self.view == View::Endpoints))
    }

    /// Returns true if nothing is read until somebody ends the pause.
    pub const fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Shows a reading. One of another view comes too late, and is ignored.
    pub fn show(&mut self, sample: Sample) {
        if sample.rows.view() != self.view {
            return;
        }
        (self.rows, self.node, self.problem) = (sample.rows, Some(sample.node), None);
        self.arrange();
    }

    /// Shows why there is no reading. The rows of the last one stay.
    pub fn show_problem(&mut self, problem: String) {
        self.problem = Some(problem);
    }

    /// Takes in a key.
    pub fn press(&mut self, input: Input) -> Action {
        if input == Input::Interrupt {
            return Action::Quit;
        }
        if self.has_help {
            self.has_help = false;
            return Action::Draw;
        }
        if self.is_typing {
            self.type_filter(input);
            return Action::Draw;
        }
        match input {
            Input::Character('q') => return Action::Quit,
            Input::Character('1') => return self.switch(View::Services),
            Input::Character('2') => return self.switch(View::Maps),
            Input::Character('3') => return self.switch(View::Programs),
            Input::Tab => return self.switch(self.next_view()),
            Input::Enter => return self.open(),
            Input::Escape => return self.leave(),
            Input::Character('p' | ' ') => {
                self.is_paused = !self.is_paused;
                return if self.is_paused { Action::Draw } else { Action::Read };
            }
            Input::Character('?' | 'h') => self.has_help = true,
            Input::Character('/') => self.is_typing = true,
            Input::Character('r') => self.sort(|sorting, _| sorting.descending = !sorting.descending),
            Input::Left => self.sort_by_neighbour(-1),
            Input::Right => self.sort_by_neighbour(1),
            other => self.move_cursor(other),
        }
        Action::Draw
    }

    /// Returns the views that the mode has.
    pub(super) fn views(&self) -> Vec<View> {
        let mode = self.node.as_ref().and_then(|node| node.mode.as_deref());
        let is_ebpf = mode.is_none_or(|mode| mode == crate::mode::Mode::Ebpf.name());
        let views = [View::Services, View::Maps, View::Programs].into_iter();
        views.filter(|view| is_ebpf || !view.is_of_ebpf()).collect()
    }

    fn next_view(&self) -> View {
        let views = self.views();
        let now = views.iter().position(|view| *view == self.view).unwrap_or(0);
        views[(now + 1) % views.len()]
    }

    fn switch(&mut self, view: View) -> Action {
        if view == self.view || !(view == View::Endpoints || self.views().contains(&view)) {
            return Action::Draw;
        }
        self.view = view;
        self.rows = Rows::none(view);
        self.problem = None;
        self.arrange();
        Action::Read
    }

    /// Opens the endpoints of the chosen Service, or of the first one.
    fn open(&mut self) -> Action {
        let Rows::Services(services) = &self.rows else { return Action::Draw };
        let chosen = self.shown.get(self.table().position).and_then(|index| services.get(*index));
        let Some(port) = chosen.map(|row| &row.port).filter(|port| !port.name.is_empty()) else {
            return Action::Draw;
        };
        let service = ServiceName { namespace: port.namespace.clone(), name: port.name.clone() };
        self.service = Some(service);
        let table = &mut self.tables[View::Endpoints as usize];
        (table.filter, table.chosen, table.position) = (String::new(), None, 0);
        self.switch(View::Endpoints)
    }

    /// Gives up the filter, then the chosen row, then the endpoints.
    fn leave(&mut self) -> Action {
        let table = &mut self.tables[self.view as usize];
        if !table.filter.is_empty() {
            table.filter.clear();
        } else if table.chosen.take().is_some() {
            table.position = 0;
        } else if self.view == View::Endpoints {
            return self.switch(View::Services);
        }
        self.arrange();
        Action::Draw
    }

    fn type_filter(&mut self, input: Input) {
        let filter = &mut self.tables[self.view as usize].filter;
        match input {
            Input::Character(character) => filter.push(character),
            Input::Backspace => drop(filter.pop()),
            Input::Enter => self.is_typing = false,
            Input::Escape => {
                filter.clear();
                self.is_typing = false;
            }
            _ => {}
        }
        self.arrange();
    }

    fn sort(&mut self, change: impl FnOnce(&mut Sorting, View)) {
        change(&mut self.tables[self.view as usize].sorting, self.view);
        self.arrange();
    }

    fn sort_by_neighbour(&mut self, step: isize) {
        self.sort(|sorting, view| {
            let columns = view.columns().len();
            sorting.column = sorting.column.checked_add_signed(step).unwrap_or(columns - 1) % columns;
            sorting.descending = is_number(view, sorting.column);
        });
    }

    fn move_cursor(&mut self, input: Input) {
        let last = self.shown.len().saturating_sub(1);
        let page = self.height.saturating_sub(1).max(1);
        let Table { position, chosen, .. } = self.table();
        // The first key only shows where the cursor is.
        let step = usize::from(chosen.is_some());
        let position = match input {
            Input::Up | Input::Character('k') => position.saturating_sub(step),
            Input::Down | Input::Character('j') => position + step,
            Input::PageUp => position.saturating_sub(page),
            Input::PageDown => position + page,
            Input::Home | Input::Character('g') => 0,
            Input::End | Input::Character('G') => last,
            _ => return,
        };
        let position = position.min(last);
        let chosen = self.shown.get(position).map(|index| self.id(*index));
        let table = &mut self.tables[self.view as usize];
        (table.position, table.chosen) = (position, chosen);
    }

    /// Sorts and filters the rows, and finds the chosen one again.
    fn arrange(&mut self) {
        let Table { sorting, filter, .. } = self.table();
        self.shown = match &self.rows {
            Rows::Services(rows) => sort_and_filter(rows, *sorting, filter),
            Rows::Endpoints(rows) => sort_and_filter(rows, *sorting, filter),
            Rows::Maps(rows) => sort_and_filter(rows, *sorting, filter),
            Rows::Programs(rows) => sort_and_filter(rows, *sorting, filter),
        };
        let chosen = self.table().chosen.as_ref();
        let found = chosen.and_then(|id| self.shown.iter().position(|index| self.id(*index) == *id));
        let last = self.shown.len().saturating_sub(1);
        let table = &mut self.tables[self.view as usize];
        table.position = if table.chosen.is_none() { 0 } else { found.unwrap_or(table.position).min(last) };
    }

    fn id(&self, index: usize) -> String {
        match &self.rows {
            Rows::Services(rows) => rows.get(index).map(TopRow::id),
            Rows::Endpoints(rows) => rows.get(index).map(TopRow::id),
            Rows::Maps(rows) => rows.get(index).map(TopRow::id),
            Rows::Programs(rows) => rows.get(index).map(TopRow::id),
        }
        .unwrap_or_default()
    }

    fn table(&self) -> &Table {
        &self.tables[self.view as usize]
    }

    pub(super) fn sorting(&self) -> Sorting {
        self.table().sorting
    }

    pub(super) fn filter(&self) -> &str {
        &self.table().filter
    }

    /// Takes in how many rows fit. Returns the index of the first row on the screen.
    pub(super) fn scroll(&mut self, height: usize) -> usize {
        self.height = height;
        let table = &mut self.tables[self.view as usize];
        let lowest = table.position.saturating_sub(height.saturating_sub(1));
        table.first = table.first.clamp(lowest, table.position);
        table.first
    }

    /// Returns the index of the chosen row among those that are shown.
    pub(super) fn chosen(&self) -> Option<usize> {
        let table = self.table();
        table.chosen.as_ref().map(|_| table.position)
    }
}

/// What the first line says about the node.
pub(super) struct NodeLine {
    pub(super) mode: String,
    pub(super) state: String,
    pub(super) is_well: bool,
}

impl Screen {
    pub(super) fn node_line(&self) -> NodeLine {
        let Some(node) = &self.node else {
            return NodeLine { mode: "-".to_owned(), state: "no answer yet".to_owned(), is_well: true };
        };
        let is_well = node.not_ready.is_empty() && node.failing.is_empty();
        let troubles: Vec<&str> = node.not_ready.iter().chain(&node.failing).map(String::as_str).collect();
        let state = if is_well { "ready".to_owned() } else { troubles.join("; ") };
        NodeLine { mode: node.mode.clone().unwrap_or_else(|| "-".to_owned()), state, is_well }
    }
}
